"""Environment packages on the Hugging Face Hub: a copy in the form of a Space, and the Spaces themselves."""
