"""The check of nvcc's words about the kernels."""

from tools.check_ptxas import faults_of, parse_log

GOOD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""


def test_resources_are_read() -> None:
    (kernel,) = parse_log(GOOD.format(stack=8, stores=4, loads=12))
    assert (kernel.name, kernel.registers) == ("_Z6kernelv", 168)
    assert (kernel.stack_bytes, kernel.spill_bytes) == (8, 12)


def test_few_spilled_bytes_pass() -> None:
    assert faults_of(GOOD.format(stack=32, stores=32, loads=32)) == []


def test_spills_and_local_arrays_fail() -> None:
    assert faults_of(GOOD.format(stack=48, stores=0, loads=40)) == ["_Z6kernelv spills 40 bytes"]
    expected = ["_Z6kernelv keeps 704 bytes in local memory"]
    assert faults_of(GOOD.format(stack=704, stores=0, loads=0)) == expected


def test_serialized_wgmma_fails() -> None:
    line = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions"
    assert faults_of(GOOD.format(stack=0, stores=0, loads=0) + line) == [line]
    assert faults_of("ptxas info : (C7508) setmaxnreg ignored") == []
