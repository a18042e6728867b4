"""A federation of sites that keep their images: what crosses, what a site does, what the server does.

Nothing here knows how messages travel: `jdfl_lightning.federation.flower` has them carried by Flower.
"""
