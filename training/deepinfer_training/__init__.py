"""How the bundled tiny checkpoint is made: data, training, drafter, calibration, export."""
