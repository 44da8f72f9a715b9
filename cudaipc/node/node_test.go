package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
)

// noteDevice is a device that notes what it is asked.
type noteDevice struct {
	cudaipc.Device
	gpu    cudaipc.UUID
	peers  cudaipc.Peers
	closed bool
}

// notePeer is a peer of such a device.
type notePeer struct {
	cudaipc.Peer
	of *noteDevice
}

func (d *noteDevice) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	if im.GPU != d.gpu {
		return nil, cudaipc.ErrKind
	}
	return &notePeer{of: d}, d.peers.Enter()
}

func (d *noteDevice) Close() error {
	err := d.peers.Close()
	d.closed = d.closed || err == nil
	return err
}

func (p *notePeer) Close() error {
	p.of.peers.Leave()
	return nil
}

// noteNode returns a node of such devices, and those it has made.
func noteNode() (*Node, map[cudaipc.UUID]*noteDevice) {
	made := map[cudaipc.UUID]*noteDevice{}
	gpu := func(u cudaipc.UUID) (cudaipc.Device, error) {
		made[u] = &noteDevice{gpu: u}
		return made[u], nil
	}
	host, _ := gpu(cudaipc.UUID{})
	return Open(Options{Host: host, GPU: gpu}), made
}

func onGPU(gpu cudaipc.UUID) cudaipc.Import {
	return cudaipc.Import{
		GPU:     gpu,
		Regions: []cudaipc.Region{{ID: 1, Kind: cudaipc.KindFD, FD: -1}, {ID: 2, Kind: cudaipc.KindCUDA, FD: -1}},
	}
}

// TestNodeRoutes each peer to the device of its GPU.
func TestNodeRoutes(t *testing.T) {
	n, made := noteNode()
	var peers []cudaipc.Peer
	for _, gpu := range []cudaipc.UUID{{}, {1}, {2}, {1}} {
		im := onGPU(gpu)
		if gpu == (cudaipc.UUID{}) {
			im.Regions = im.Regions[:1]
		}
		p, err := n.Import(im)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.(*notePeer).of.gpu; got != gpu {
			t.Errorf("a peer of GPU %v is on %v", gpu, got)
		}
		peers = append(peers, p)
	}
	if len(made) != 3 {
		t.Fatalf("%d devices, want one for the host and one for each of 2 GPUs", len(made))
	}
	if err := n.Close(); !errors.Is(err, cudaipc.ErrBusy) {
		t.Errorf("Close with open peers: %v, want ErrBusy", err)
	}
	for _, p := range peers {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	for _, d := range made {
		if !d.closed {
			t.Errorf("GPU %v is open", d.gpu)
		}
	}
}

func TestNodeRefuses(t *testing.T) {
	n, _ := noteNode()
	if _, err := n.Import(onGPU(cudaipc.UUID{})); !errors.Is(err, cudaipc.ErrKind) {
		t.Errorf("GPU memory without a UUID: %v, want ErrKind", err)
	}
	_, err := Open(Options{Host: &noteDevice{}, NoGPU: "the reason"}).Import(onGPU(cudaipc.UUID{1}))
	if !errors.Is(err, cudaipc.ErrNoCUDA) || !strings.Contains(err.Error(), "the reason") {
		t.Errorf("GPU memory and no GPU: %v, want ErrNoCUDA with the reason", err)
	}
}

// TestNodeForgetsGPUs expects unused GPUs to be closed when there are too many.
func TestNodeForgetsGPUs(t *testing.T) {
	n, made := noteNode()
	var peers []cudaipc.Peer
	for i := range MaxGPUs {
		p, err := n.Import(onGPU(cudaipc.UUID{byte(i + 1)}))
		if err != nil {
			t.Fatal(err)
		}
		peers = append(peers, p)
	}
	if _, err := n.Import(onGPU(cudaipc.UUID{200})); !errors.Is(err, cudaipc.ErrBusy) {
		t.Errorf("one GPU more than MaxGPUs: %v, want ErrBusy", err)
	}
	if err := peers[4].Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Import(onGPU(cudaipc.UUID{200})); err != nil || !made[cudaipc.UUID{5}].closed {
		t.Errorf("one GPU more when another is not used: %v, that one is closed: %v", err, made[cudaipc.UUID{5}].closed)
	}
}

func TestGPUNode(t *testing.T) {
	root := t.TempDir()
	gpu := cudaipc.UUID{0xab, 0xcd}
	for path, text := range map[string]string{
		"proc/driver/nvidia/gpus/0000:0A:00.0/information": "Model: X\n" +
			"GPU UUID: \t GPU-ABCD0000-0000-0000-0000-000000000000\n",
		"sys/bus/pci/devices/0000:0a:00.0/numa_node": "1\n",
	} {
		file := filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
			os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if node, other := numaNode(root, gpu), numaNode(root, cudaipc.UUID{1}); node != 1 || other != -1 {
		t.Errorf("node %d and %d, want 1 and -1", node, other)
	}
}

// TestGPUEnv expects a MIG instance to be named in the environment of its mover, and nothing else.
func TestGPUEnv(t *testing.T) {
	gpu, instance := cudaipc.UUID{0xab, 0xcd}, cudaipc.UUID{0x12, 0x34, 15: 0x56}
	for name, test := range map[string]struct {
		known []string // the UUIDs of the kernel's GPUs
		of    cudaipc.UUID
		want  []string
	}{
		"a GPU": {[]string{"GPU-ABCD0000-0000-0000-0000-000000000000", "GPU-1"}, gpu, nil},
		"an instance": {
			[]string{"GPU-ABCD0000-0000-0000-0000-000000000000", "GPU-1"}, instance,
			[]string{"CUDA_VISIBLE_DEVICES=MIG-12340000-0000-0000-0000-000000000056"},
		},
		"not known":                 {nil, instance, nil},
		"one that was never opened": {[]string{"GPU-1", "????????-????-????-????-????????????"}, instance, nil},
	} {
		root := t.TempDir()
		for i, uuid := range test.known {
			file := filepath.Join(root, fmt.Sprintf("proc/driver/nvidia/gpus/0000:%02x:00.0/information", i))
			if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
				os.WriteFile(file, []byte("Model: X\nGPU UUID: \t "+uuid+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if got := gpuEnv(root, test.of); !slices.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestGPUNodes expects the nodes of all GPUs, each once, on machines that have several, and a
// reason on others.
func TestGPUNodes(t *testing.T) {
	for name, test := range map[string]struct {
		nodes int
		gpus  []string // the node of each
		want  []int
		why   string
	}{
		"one node":      {1, []string{"0"}, nil, "one NUMA node"},
		"no node":       {0, []string{"-1"}, nil, "one NUMA node"},
		"two sockets":   {2, []string{"1", "0", "1"}, []int{0, 1}, ""},
		"one of two":    {2, []string{"1"}, []int{1}, ""},
		"not told":      {2, []string{"-1"}, nil, "does not tell"},
		"no GPU at all": {2, nil, nil, "no GPU"},
	} {
		root := t.TempDir()
		write := func(path, text string) {
			file := filepath.Join(root, path)
			if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
				os.WriteFile(file, []byte(text+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		for i := range test.nodes {
			write(fmt.Sprintf("sys/devices/system/node/node%d/cpulist", i), "0")
		}
		for i, node := range test.gpus {
			write(fmt.Sprintf("proc/driver/nvidia/gpus/0000:%02X:00.0/information", 10+i), "Model: X")
			write(fmt.Sprintf("sys/bus/pci/devices/0000:%02x:00.0/numa_node", 10+i), node)
		}
		got, why := numaNodes(root)
		if !slices.Equal(got, test.want) || (why == "") != (test.why == "") || !strings.Contains(why, test.why) {
			t.Errorf("%s: %v, %q, want %v and %q", name, got, why, test.want, test.why)
		}
	}
}
