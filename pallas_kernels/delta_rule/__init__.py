"""The delta rule: DeltaNet, Gated DeltaNet and KLA."""
