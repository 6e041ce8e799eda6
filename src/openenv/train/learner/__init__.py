"""A small trainer on this machine: a language model of transformers that samples, answers requests and learns."""
