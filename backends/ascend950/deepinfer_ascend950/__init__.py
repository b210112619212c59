"""Backend for Ascend 950 NPUs. This version only probes."""
