"""The bytes that a step sends, by formula, for each axis and collective. Each file imports only earlier ones:

sent, order, sharding, step_traffic.
"""
