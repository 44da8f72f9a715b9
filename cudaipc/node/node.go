// Package node combines all devices of a node into one, and finds the node's GPUs and their NUMA
// nodes from the kernel's files, without a driver call.
package node

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// MaxGPUs bounds the GPUs open at once. A further one replaces one without peers, or is refused.
const MaxGPUs = 64

// placeShift leaves the low bits of a ticket to its device.
const placeShift = 48

// Options say what devices a node has.
type Options struct {
	Host cudaipc.Device // for peers without GPU memory; the node's from OpenNode on
	// GPU makes the device of one GPU, usually a Mover, at its first peer; nil: there is none.
	GPU func(cudaipc.UUID) (cudaipc.Device, error)
	// NoGPU is why GPU is nil, for the error; may be empty.
	NoGPU string
}

// Node is all devices of a node as one: each peer is on the host's device or on that of its GPU.
// The first device is the host's. Tickets have the place of their device in their high bits, so
// that Done finds it.
type Node struct {
	opts Options

	mu struct {
		sync.RWMutex
		devices []*device // by place; nil: free
		peers   map[cudaipc.PeerID]*device
		closed  bool
	}
}

// device is one device of a node; peers is under Node.mu.
type device struct {
	cudaipc.Device
	place int
	gpu   cudaipc.UUID
	peers int // imported, or being imported
}

var _ cudaipc.Device = (*Node)(nil)

// Open makes a node of its devices.
func Open(o Options) *Node {
	n := &Node{opts: o}
	n.mu.devices = []*device{{Device: o.Host}}
	n.mu.peers = map[cudaipc.PeerID]*device{}
	return n
}

// Import opens the regions of a peer on their device.
func (n *Node) Import(im cudaipc.Import) error {
	d, err := n.route(&im)
	if err != nil {
		im.CloseAll()
		return fmt.Errorf("peer %d: %w", im.Peer, err)
	}
	err = d.Import(im)
	if err != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		d.peers--
		delete(n.mu.peers, im.Peer)
	}
	return err
}

// route finds the device of an import and registers the peer.
func (n *Node) route(im *cudaipc.Import) (*device, error) {
	onGPU := im.OnGPU()
	if onGPU && im.GPU == (cudaipc.UUID{}) {
		return nil, fmt.Errorf("GPU memory, and no UUID of its GPU: %w", cudaipc.ErrKind)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.mu.closed:
		return nil, cudaipc.ErrClosed
	case im.Peer == cudaipc.AllPeers:
		return nil, fmt.Errorf("the number stands for all peers: %w", cudaipc.ErrPeer)
	case n.mu.peers[im.Peer] != nil:
		return nil, fmt.Errorf("imported already: %w", cudaipc.ErrBusy)
	}
	d := n.mu.devices[0]
	if onGPU {
		var err error
		if d, err = n.gpuLocked(im.GPU); err != nil {
			return nil, err
		}
	}
	d.peers++
	n.mu.peers[im.Peer] = d
	return d, nil
}

// gpuLocked finds or makes the device of a GPU.
func (n *Node) gpuLocked(gpu cudaipc.UUID) (*device, error) {
	if n.opts.GPU == nil {
		return nil, fmt.Errorf("GPU %v: %w: %s", gpu, cudaipc.ErrNoCUDA, n.opts.NoGPU)
	}
	for _, d := range n.mu.devices[1:] {
		if d != nil && d.gpu == gpu {
			return d, nil
		}
	}
	place, err := n.placeLocked()
	if err != nil {
		return nil, err
	}
	opened, err := n.opts.GPU(gpu)
	if err != nil {
		return nil, fmt.Errorf("GPU %v: %w", gpu, err)
	}
	d := &device{Device: opened, place: place, gpu: gpu}
	n.mu.devices[place] = d
	return d, nil
}

// placeLocked finds room for one more GPU.
func (n *Node) placeLocked() (int, error) {
	for place, d := range n.mu.devices {
		if d == nil {
			return place, nil
		}
	}
	if len(n.mu.devices) <= MaxGPUs {
		n.mu.devices = append(n.mu.devices, nil)
		return len(n.mu.devices) - 1, nil
	}
	for place, d := range n.mu.devices[1:] {
		if d.peers == 0 && d.Close(cudaipc.AllPeers) == nil {
			n.mu.devices[place+1] = nil
			return place + 1, nil
		}
	}
	return 0, fmt.Errorf("%d GPUs have peers, at most %d: %w", MaxGPUs, MaxGPUs, cudaipc.ErrBusy)
}

// Close closes a peer, or with AllPeers all devices, which is ErrBusy while a copy of a peer is in
// flight on any, and may then be called again.
func (n *Node) Close(id cudaipc.PeerID) error {
	if id == cudaipc.AllPeers {
		return n.closeAll()
	}
	d, err := n.device(id)
	if err != nil {
		return err
	}
	if err := d.Close(id); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.mu.peers, id)
	d.peers--
	return nil
}

func (n *Node) closeAll() (err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.mu.closed {
		return cudaipc.ErrClosed
	}
	for _, d := range n.mu.devices {
		if d == nil {
			continue
		}
		if again := d.Close(cudaipc.AllPeers); !errors.Is(again, cudaipc.ErrClosed) { // by a call before
			err = errors.Join(err, again)
		}
	}
	n.mu.closed = err == nil
	return err
}

func (n *Node) device(id cudaipc.PeerID) (*device, error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.mu.closed {
		return nil, cudaipc.ErrClosed
	}
	d := n.mu.peers[id]
	if d == nil {
		return nil, fmt.Errorf("peer %d: %w", id, cudaipc.ErrPeer)
	}
	return d, nil
}

// Poll asks the peer's device.
func (n *Node) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	d, err := n.device(w.Peer)
	if err != nil {
		return cudaipc.State{}, err
	}
	return d.Poll(w)
}

// Copy starts a copy on the peer's device.
func (n *Node) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	d, err := n.device(c.Peer)
	if err != nil {
		return 0, err
	}
	t, err := d.Copy(c)
	return t | cudaipc.Ticket(d.place)<<placeShift, err
}

// Done asks the device that gave the ticket.
func (n *Node) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	n.mu.RLock()
	var d *device
	if place := int(t >> placeShift); place < len(n.mu.devices) {
		d = n.mu.devices[place]
	}
	n.mu.RUnlock()
	if d == nil {
		return cudaipc.Done{}, false, fmt.Errorf("ticket %d: %w", t, cudaipc.ErrTicket)
	}
	return d.Done(t&(1<<placeShift-1), timeout)
}

// Movers returns the states of those devices that run in processes of their own.
func (n *Node) Movers() []cudaipc.MoverState {
	all := []cudaipc.MoverState{}
	n.mu.RLock()
	devices := append([]*device(nil), n.mu.devices...)
	n.mu.RUnlock()
	for _, d := range devices {
		if d == nil {
			continue
		}
		if m, ok := d.Device.(interface{ Movers() []cudaipc.MoverState }); ok {
			all = append(all, m.Movers()...)
		}
	}
	return all
}

// Sum starts a sample on the peer's device.
func (n *Node) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	d, err := n.device(s.Peer)
	if err != nil {
		return 0, err
	}
	t, err := d.Sum(s)
	return t | cudaipc.Ticket(d.place)<<placeShift, err
}

// SetWord calls SetWord of the peer's device.
func (n *Node) SetWord(id cudaipc.PeerID, off, value uint64) error {
	d, err := n.device(id)
	if err != nil {
		return err
	}
	return d.SetWord(id, off, value)
}
