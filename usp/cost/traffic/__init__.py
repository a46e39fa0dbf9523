"""The bytes that a step sends, by formula, per axis and collective. Each file imports only earlier ones:

sent, order, sharding, attention_traffic, pass_traffic, step_traffic, call_traffic.
"""
