"""How a package is run and watched for its checks: plans, evidence, the order of graders, what is kept on disk."""
