//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"strings"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// FindGPU finds a GPU, or a MIG instance, by its UUID among those that this process sees.
func FindGPU(id cudaipc.UUID) (driver.GPU, error) {
	gpus, err := listGPUs()
	if err != nil {
		return driver.GPU{}, err
	}
	if id == (cudaipc.UUID{}) {
		if len(gpus) == 1 {
			return gpus[0], nil
		}
		return driver.GPU{}, fmt.Errorf("%w: no GPU is named, and this process sees %s", cudaipc.ErrNoCUDA,
			namesOf(gpus))
	}
	for _, g := range gpus {
		if cudaipc.UUID(g.UUID) == id {
			return g, nil
		}
	}
	return driver.GPU{}, fmt.Errorf("%w: GPU %s is not among those that this process sees, which are %s: "+
		"give it the engine's GPU by its UUID (for a MIG instance the instance's), "+
		"in CUDA_VISIBLE_DEVICES or as the container's device", cudaipc.ErrNoCUDA, id, namesOf(gpus))
}

func listGPUs() ([]driver.GPU, error) {
	err := driver.Load()
	if errors.Is(err, driver.ErrNoLibrary) {
		return nil, fmt.Errorf("%w: %w: install the NVIDIA driver, "+
			"or give the container its libraries (capability \"compute\")", cudaipc.ErrNoCUDA, err)
	}
	var gpus []driver.GPU
	if err == nil {
		gpus, err = driver.GPUs()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", cudaipc.ErrNoCUDA, withOpenHint(err))
	}
	return gpus, nil
}

func namesOf(gpus []driver.GPU) string {
	if len(gpus) == 0 {
		return "none"
	}
	var names []string
	for _, g := range gpus {
		names = append(names, cudaipc.UUID(g.UUID).String())
	}
	return strings.Join(names, ", ")
}

// SeeGPUs returns why no GPU is visible, or nil if one is.
func SeeGPUs() error {
	gpus, err := listGPUs()
	if err == nil && len(gpus) == 0 {
		err = fmt.Errorf("%w: the driver sees no GPU", cudaipc.ErrNoCUDA)
	}
	return err
}

// openHints tell the user what to set, by the driver's error for a GPU that it does not open.
var openHints = map[int]string{
	driver.OutOfMemory: "the GPU has no memory left for the agent's own part, some hundred MiB: " +
		"lower the engine's gpu_memory_utilization a little",
	driver.NoDevice: "no GPU is shown to this process: see NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES, " +
		"and the container's devices",
	driver.DeviceUnavailable: "the GPU is in exclusive compute mode, or another process holds it alone: " +
		"nvidia-smi -c DEFAULT",
	driver.SystemNotReady: "the machine's NVSwitch fabric is not up: nvidia-fabricmanager must run",
	driver.DriverMismatch: "the driver's library is not of the kernel's module: " +
		"restart the container, or the node, after an update of the driver",
	driver.CompatUnsupported: "a compatibility library of CUDA shadows the driver's own on a GPU that it is not for: " +
		"take it out of LD_LIBRARY_PATH",
	driver.Unknown: "the kernel's module does not answer: see dmesg for Xid lines, nvidia-smi, " +
		"and that /dev/nvidia* are in the container, nvidia-uvm too",
}

// withOpenHint adds to an error of opening a GPU what the user can set.
func withOpenHint(err error) error {
	if hint, found := openHints[driver.CodeOf(err)]; found {
		return fmt.Errorf("%w: %s", err, hint)
	}
	return err
}
