"""Pure arithmetic: a RunConfig and efficiency tables become a Plan and a Prediction. No torch, no I/O."""
