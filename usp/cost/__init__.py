"""What a training step costs, before it runs. Each file imports only earlier ones:

job.
"""
