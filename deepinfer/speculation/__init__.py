"""How many drafts a step verifies: costs, planner, calibration, metrics. Knows no engine."""
