"""The web page of a served environment. A server without the page loads none of this."""
