"""The device layer: op contracts, runtime protocols, weights and formats backends work on."""
