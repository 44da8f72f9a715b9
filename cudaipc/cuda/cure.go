//go:build cuda

package cuda

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// openCures say what the user sets, by what the driver says of a GPU that it does not open.
var openCures = map[int]string{
	driver.OutOfMemory:       "the GPU has no memory left for the agent's own part, some hundred MiB: lower the engine's gpu_memory_utilization a little",
	driver.NoDevice:          "no GPU is shown to this process: see NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES, and the container's devices",
	driver.DeviceUnavailable: "the GPU is in exclusive compute mode, or another process holds it alone: nvidia-smi -c DEFAULT",
	driver.SystemNotReady:    "the machine's NVSwitch fabric is not up: nvidia-fabricmanager must run",
	driver.DriverMismatch:    "the driver's library is not of the kernel's module: restart the container, or the node, after an update of the driver",
	driver.CompatUnsupported: "a compatibility library of CUDA shadows the driver's own on a GPU that it is not for: take it out of LD_LIBRARY_PATH",
	driver.Unknown:           "the kernel's module does not answer: see dmesg for Xid lines, nvidia-smi, and that /dev/nvidia* are in the container, nvidia-uvm too",
}

// whyNotOpened says what the user sets.
func whyNotOpened(err error) error {
	if cure, known := openCures[driver.CodeOf(err)]; known {
		return fmt.Errorf("%w: %s", err, cure)
	}
	return err
}
