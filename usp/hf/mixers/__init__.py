"""Recurrent and convolutional layers of transformers models on a sharded sequence. Each file imports only earlier ones:

recurrences, sharded_mixers.
"""
