//go:build cuda

package cuda

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/cudaipc/kernel"
)

// The lists of a lane, for the copy kernel.
const (
	listEntries = 16384 // of one list, which is of one chunk
	maxLists    = 8     // in use at once
)

// copyKernel is the kernel of a device. It is loaded only if the copy table names it.
type copyKernel struct {
	*driver.Kernel       // nil: not loaded
	err            error // why it is not, though the table names it: its copies are batches then
}

// load loads the kernel. It is called in a role.
func (k *copyKernel) load() { k.Kernel, k.err = driver.LoadKernel(kernel.PTX, kernel.Name) }

// unload unloads the kernel, if it was loaded. It is called in a role; no launch is in flight.
func (k *copyKernel) unload() error {
	if k.Kernel == nil {
		return nil
	}
	return k.Unload()
}

// lists is pinned memory for the kernel's lists. A list is unchanged until its chunk has ended.
type lists struct {
	mem  []byte
	at   driver.Addr // of mem, as the GPU sees it
	free []int
}

func newLists() (*lists, error) {
	const size = listEntries * kernel.EntryBytes
	mem, err := driver.AllocPinned(size * maxLists)
	if err != nil {
		return nil, err
	}
	l := &lists{mem: mem}
	for i := range maxLists {
		l.free = append(l.free, i*size)
	}
	if l.at, err = driver.Address(mem); err != nil {
		return l, err
	}
	return l, nil
}

// room reports whether one more chunk can have a list. A lane without lists needs none.
func (l *lists) room() bool { return l == nil || len(l.free) > 0 }

func (l *lists) close() error {
	if l == nil {
		return nil
	}
	return driver.FreePinned(l.mem)
}

// list is the copies of one chunk that the kernel does.
type list struct {
	off   int // in lists.mem
	count int
}

// addToList puts rows into the chunk's list and reports whether there was room. A rectangle has
// listEntries rows at most.
func (l *lane) addToList(r *rect) (bool, error) {
	arena, err := l.arenaAt(r.off)
	if err != nil {
		return false, err
	}
	if l.list == nil {
		last := len(l.lists.free) - 1
		l.list = &list{off: l.lists.free[last]}
		l.lists.free = l.lists.free[:last]
	}
	if uint64(l.list.count)+r.rows > listEntries {
		return false, nil
	}
	for i := range r.rows {
		dst, src := uint64(arena)+i*r.offPitch, r.dev+i*r.devPitch
		if l.dir == cudaipc.Scatter {
			dst, src = src, dst
		}
		kernel.Put(l.lists.mem[l.list.off:], l.list.count, dst, src, r.n)
		l.list.count++
	}
	return true, nil
}

// arenaAt returns the GPU's address of a place in a pinned piece of the arena.
func (l *lane) arenaAt(off uint64) (driver.Addr, error) {
	i := off / l.d.pins.piece
	at, found := l.pieces[i]
	if !found {
		var err error
		if at, err = driver.Address(l.d.pins.mem(int(i))); err != nil {
			return 0, err
		}
		l.pieces[i] = at
	}
	return at + driver.Addr(off%l.d.pins.piece), nil
}

// launch starts the kernel for the chunk's list.
func (l *lane) launch() error {
	if l.list == nil || l.list.count == 0 {
		return nil
	}
	l.counts.kernels.Add(1)
	at := l.lists.at + driver.Addr(l.list.off)
	return l.d.kernel.Launch(l.stream, kernel.Blocks, kernel.Threads, at, uint32(l.list.count))
}
