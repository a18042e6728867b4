"""A federation of sites that keep their images: messages, site and server.

Only `jdfl_lightning.federation.flower` depends on the transport, Flower.
"""
