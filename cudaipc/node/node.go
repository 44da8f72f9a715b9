// Package node combines all devices of a node into one, and finds the node's GPUs and their NUMA
// nodes from the kernel's files, without a driver call.
package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvagent/kvagent/cudaipc"
)

// MaxGPUs bounds the GPUs open at once. A further one replaces one without peers, or is refused.
const MaxGPUs = 64

// Options say what devices a node has.
type Options struct {
	Host cudaipc.Device // for peers without GPU memory; the node's from OpenNode on
	// GPU makes the device of one GPU, usually a Mover, at its first peer; nil: there is none.
	GPU func(cudaipc.UUID) (cudaipc.Device, error)
	// NoGPU is why GPU is nil, for the error; may be empty.
	NoGPU string
}

// Node is all devices of a node as one: each peer is on the host's device or on that of its GPU.
type Node struct {
	opts Options

	mu struct {
		sync.Mutex
		devices []device // the first is the host's
		closed  bool
	}
}

type device struct {
	cudaipc.Device
	gpu cudaipc.UUID
}

var _ cudaipc.Device = (*Node)(nil)

// Open makes a node of its devices.
func Open(o Options) *Node {
	n := &Node{opts: o}
	n.mu.devices = []device{{Device: o.Host}}
	return n
}

// Import opens the regions of a peer on their device.
func (n *Node) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	d, err := n.route(&im)
	if err != nil {
		im.CloseAll()
		return nil, err
	}
	return d.Import(im)
}

// route finds or makes the device of an import.
func (n *Node) route(im *cudaipc.Import) (d cudaipc.Device, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.mu.closed:
		return nil, cudaipc.ErrClosed
	case !im.OnGPU():
		return n.opts.Host, nil
	case im.GPU == (cudaipc.UUID{}):
		return nil, fmt.Errorf("GPU memory, and no UUID of its GPU: %w", cudaipc.ErrKind)
	case n.opts.GPU == nil:
		return nil, fmt.Errorf("GPU %v: %w: %s", im.GPU, cudaipc.ErrNoCUDA, n.opts.NoGPU)
	}
	for _, d := range n.mu.devices[1:] {
		if d.gpu == im.GPU {
			return d, nil
		}
	}
	if err = n.makeRoomLocked(); err == nil {
		d, err = n.opts.GPU(im.GPU)
	}
	if err != nil {
		return nil, fmt.Errorf("GPU %v: %w", im.GPU, err)
	}
	n.mu.devices = append(n.mu.devices, device{d, im.GPU})
	return d, nil
}

// makeRoomLocked makes room for one more GPU. An import on the GPU that it gives up fails.
func (n *Node) makeRoomLocked() error {
	if len(n.mu.devices) <= MaxGPUs {
		return nil
	}
	idle := slices.IndexFunc(n.mu.devices[1:], func(d device) bool { return d.Close() == nil })
	if idle < 0 {
		return fmt.Errorf("%d GPUs have peers, at most %d: %w", MaxGPUs, MaxGPUs, cudaipc.ErrBusy)
	}
	n.mu.devices = slices.Delete(n.mu.devices, idle+1, idle+2)
	return nil
}

// Close closes all devices. While a peer is open on any it is ErrBusy; it may be called again.
func (n *Node) Close() (err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.closed {
		return cudaipc.ErrClosed
	}
	for _, d := range n.mu.devices {
		if again := d.Close(); !errors.Is(again, cudaipc.ErrClosed) { // by a call before
			err = errors.Join(err, again)
		}
	}
	n.mu.closed = err == nil
	return err
}

// Movers returns the states of those devices that run in processes of their own.
func (n *Node) Movers() []cudaipc.MoverState {
	n.mu.Lock()
	devices := slices.Clone(n.mu.devices)
	n.mu.Unlock()
	all := []cudaipc.MoverState{}
	for _, d := range devices {
		if m, ok := d.Device.(interface{ Movers() []cudaipc.MoverState }); ok {
			all = append(all, m.Movers()...)
		}
	}
	return all
}
