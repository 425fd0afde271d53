"""What has to hold on real models: one line per point with its figure. `make acceptance` runs them."""
