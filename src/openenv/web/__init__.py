"""The web page of a served environment: what it shows, its routes, its live updates, and the bridge to Gradio pages.

Every visitor plays in a session of the server's own session manager. A server without the page loads none of this.
"""
