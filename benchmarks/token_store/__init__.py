"""Token stores: how fast they are written, and what reading them costs a training step."""
