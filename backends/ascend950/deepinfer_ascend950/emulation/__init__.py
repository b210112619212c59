"""torch_npu's operators and device on the CPU, by what their documentation says.

Nothing here is written from DeepInfer's op contracts: an emulation that followed them would
agree with a wrong call. Each function names the page it follows, checks the constraints stated
there, and gives NaN where the page leaves a value undefined. Agreement with an NPU is not shown.
"""
