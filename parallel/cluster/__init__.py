"""A model of the hardware: rates of devices and links, and the time that compute and communication take on them.

Each file imports only earlier ones: json_objects, hardware, links.
"""
