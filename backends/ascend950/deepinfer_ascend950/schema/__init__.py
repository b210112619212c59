"""What torch_npu's operators accept: schemas of one wheel, and the check of calls against them."""
