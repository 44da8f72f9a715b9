package node

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// NUMANodes are the NUMA nodes that this machine's GPUs are on, as the kernel tells them without a driver call: where memory is to
// lie that GPUs copy from. Where there are none, why says so.
func NUMANodes() (nodes []int, why string) { return numaNodes("/") }

// What the kernel says of an NVIDIA GPU on the bus: the maker, and the first two bytes of the class (display controllers with and
// without a screen).
const nvidiaVendor = "0x10de"

var gpuClasses = []string{"0x0300", "0x0302"}

// numaNodes is GPUNodes below root, which is / but for tests.
func numaNodes(root string) (nodes []int, why string) {
	if all, err := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*")); err != nil || len(all) < 2 {
		return nil, "this machine has one NUMA node, or none"
	}
	devices, err := filepath.Glob(filepath.Join(root, "sys/bus/pci/devices/*"))
	if err != nil {
		return nil, err.Error()
	}
	gpus := 0
	for _, device := range devices {
		if !isGPU(device) {
			continue
		}
		gpus++
		if n, err := strconv.Atoi(readWord(device, "numa_node")); err == nil && n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	switch {
	case gpus == 0:
		return nil, "the kernel shows no GPU on the PCI bus"
	case len(nodes) == 0:
		return nil, "the kernel does not tell the GPUs' NUMA nodes"
	}
	return nodes, ""
}

func isGPU(device string) bool {
	class := readWord(device, "class")
	return readWord(device, "vendor") == nvidiaVendor && len(class) >= 6 && slices.Contains(gpuClasses, class[:6])
}

// readWord is what a file of sysfs says, empty if it cannot be read.
func readWord(folder, name string) string {
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
