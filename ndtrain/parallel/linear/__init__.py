"""The products with weights: forward, backward, and gradients that are written straight into the flat buffers."""
