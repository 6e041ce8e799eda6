"""Tasks and checks: the work an agent does and how it is judged."""
