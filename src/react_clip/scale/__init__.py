"""From one machine to many: the same defence, evaluation and service on a Ray cluster."""
