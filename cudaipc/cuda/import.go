//go:build cuda

package cuda

import (
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
	"github.com/kvagent/kvagent/pagefault"
)

// peer is a cudaipc.Base and what is open of it on the GPU, unchanged from Import to Close.
type peer struct {
	cudaipc.Base
	d           *Device
	allocations map[driver.Handle]driver.Addr // each opened once per import, however many regions are in it
	ranges      []*driver.Range
	events      []driver.Event
	wordsRegion *cudaipc.Opened // the mapping of the words, which is no region to copy
	statm       int             // /proc/PID/statm; -1: not watched, or of no use
}

// Import opens the regions and the events of a peer, all or none.
func (d *Device) Import(im cudaipc.Import) (cudaipc.Peer, error) {
	defer im.CloseRegions()
	p := &peer{d: d, allocations: map[driver.Handle]driver.Addr{}, statm: -1}
	err := p.Prepare(&im)
	p.Proof, p.Lost = im.Proof, d.lost.ch
	if lost := d.alive(); lost != nil {
		err = lost
	}
	if err == nil {
		err = d.peers.Enter()
	}
	if err == nil {
		d.opener.Do(func() { err = d.openOnGPU(p, &im) })
		if err == nil {
			return p, nil
		}
		d.peers.Leave()
	}
	p.closeRest()
	return nil, err
}

// Close closes a peer; that of a lost device without calling the driver.
func (p *peer) Close() (err error) {
	lost := p.d.alive()
	if err := p.Shut(lost != nil); err != nil {
		return err
	}
	if lost == nil {
		p.d.opener.Do(func() { err = p.d.closeOnGPU(p) })
	}
	p.closeRest()
	p.d.peers.Leave()
	return errors.Join(err, lost)
}

// openOnGPU opens everything or nothing. The opener calls it.
func (d *Device) openOnGPU(p *peer, im *cudaipc.Import) error {
	err := d.openAll(p, im)
	if err == nil {
		return nil
	}
	if err := d.judge(err); d.alive() != nil {
		return err
	}
	return errors.Join(err, d.closeOnGPU(p))
}

func (d *Device) openAll(p *peer, im *cudaipc.Import) error {
	if im.Pid > 0 {
		if err := p.Watch(); err != nil {
			return err
		}
	}
	for left := im.Regions; len(left) > 0; {
		n := pieces(left)
		r, err := d.openRegion(p, im, left[:n])
		if err != nil {
			return fmt.Errorf("region %d: %w", left[0].ID, err)
		}
		p.Regions[left[0].ID] = r
		if left = left[n:]; p.Dead() {
			return cudaipc.ErrPeerDead
		}
	}
	if err := d.openWords(p, im); err != nil {
		return err
	}
	if im.Pid > 0 {
		p.watchMemory()
	}
	return nil
}

// pieces returns how many of the first elements are one region, by their ID.
func pieces(list []cudaipc.Region) int {
	n := 1
	for n < len(list) && list[n].ID == list[0].ID {
		n++
	}
	return n
}

// openRegion opens a region of one element, or of the pieces of virtual memory.
func (d *Device) openRegion(p *peer, im *cudaipc.Import, parts []cudaipc.Region) (*cudaipc.Opened, error) {
	r := &parts[0]
	if (r.Kind == cudaipc.KindCUDA || r.Kind == cudaipc.KindCUDAFD) && im.GPU != cudaipc.UUID(d.gpu.UUID) {
		return nil, fmt.Errorf("it is on GPU %s, this device is GPU %s: "+
			"an engine and its agent's device are matched by UUID: %w",
			im.GPU, cudaipc.UUID(d.gpu.UUID), cudaipc.ErrNoCUDA)
	}
	switch {
	case r.Kind == cudaipc.KindCUDA:
		return d.openHandle(p, r)
	case r.Kind == cudaipc.KindCUDAFD:
		return d.openVirtual(p, parts)
	case r.Kind == cudaipc.KindFD && im.Sync != nil && im.Sync.Region == r.ID:
		mem, err := cudaipc.MapFD(r.FD, int64(r.Size))
		return &cudaipc.Opened{Size: r.Size, Mem: mem}, err
	case r.Kind == cudaipc.KindFD || r.Kind == cudaipc.KindPeer:
		return nil, fmt.Errorf("kind %d on a GPU is for the words alone: "+
			"KV memory comes as a CUDA IPC handle (kind %d) or as descriptors (kind %d): %w",
			r.Kind, cudaipc.KindCUDA, cudaipc.KindCUDAFD, cudaipc.ErrKind)
	}
	return nil, fmt.Errorf("kind %d on a GPU: %w", r.Kind, cudaipc.ErrKind)
}

// openHandle opens the allocation of a region, if none before did, and finds the region in it.
func (d *Device) openHandle(p *peer, r *cudaipc.Region) (*cudaipc.Opened, error) {
	var handle driver.Handle
	if copy(handle[:], r.Handle) != len(handle) || len(r.Handle) != len(handle) {
		return nil, fmt.Errorf("handle of %d bytes, want %d: %w", len(r.Handle), len(handle), cudaipc.ErrRange)
	}
	start, open := p.allocations[handle]
	if !open {
		var err error
		if start, err = driver.OpenMemory(&handle); err != nil {
			return nil, withHandleHint(err)
		}
		p.allocations[handle] = start
		d.imports.Add(1)
	}
	base, size, err := driver.AllocationOf(start)
	if err != nil {
		return nil, err
	}
	if base != start || r.Addr > size || r.Size > size-r.Addr {
		return nil, fmt.Errorf("%d bytes at %d of an allocation of %d: %w", r.Size, r.Addr, size, cudaipc.ErrRange)
	}
	return &cudaipc.Opened{Size: r.Size, Addr: uint64(base) + r.Addr}, nil
}

// withHandleHint adds to an error of opening a memory handle what the user can set.
func withHandleHint(err error) error {
	hint := "the engine and this process need the same GPU, one /dev/shm (a volume for both, or one IPC " +
		"namespace: docker --ipc, Kubernetes hostIPC), on some drivers one PID namespace (--pid, hostPID) and one " +
		"user id (--user, runAsUser), and the engine must be alive"
	switch driver.CodeOf(err) {
	case driver.InvalidValue, driver.NotSupported:
		hint = "memory of PyTorch's expandable segments has no such handle " +
			"(set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or send it as descriptors), " +
			"nor has that of vLLM's sleep mode (start the engine without enable_sleep_mode); else " + hint
	case driver.OutOfMemory:
		hint = "the GPU has no memory left for the mapping: lower the engine's gpu_memory_utilization a little"
	}
	return fmt.Errorf("%w: %w: %s", cudaipc.ErrKind, err, hint)
}

// openWords finds the words and opens the events. The words' region is none to copy from any more.
func (d *Device) openWords(p *peer, im *cudaipc.Import) error {
	s := im.Sync
	if err := p.PlaceWords(s, cudaipc.CUDAEventCell); err != nil || p.Words == nil {
		return err
	}
	p.wordsRegion = p.Regions[s.Region]
	delete(p.Regions, s.Region)
	if s.Events > MaxEvents {
		return fmt.Errorf("sync: %d events, at most %d: %w", s.Events, MaxEvents, cudaipc.ErrRange)
	}
	for i := range s.Events {
		var handle driver.Handle
		at := s.EventsOff + uint64(i)*cudaipc.CUDAEventCell
		if err := pagefault.Guard(p.Words, p.Words, func() { copy(handle[:], p.Words[at:]) }); err != nil {
			return fmt.Errorf("sync: event %d: %w", i, err)
		}
		e, err := driver.OpenEvent(&handle)
		if err != nil {
			return fmt.Errorf("sync: event %d: %w: %w: make it with interprocess=True, on the GPU of the regions, "+
				"and keep it as long as the session; the engine and this process need one /dev/shm (a volume for "+
				"both, or one IPC namespace), on some drivers one PID namespace and one user id", i,
				cudaipc.ErrKind, err)
		}
		p.events = append(p.events, e)
		if d.imports.Add(1); p.Dead() {
			return cudaipc.ErrPeerDead
		}
	}
	return nil
}

// closeOnGPU closes everything of a peer on the GPU. The opener calls it; no copy of the peer is
// in flight. Memory that cannot be closed stays taken while this process lives, so the device is
// lost. An event that cannot be closed, which happens when its process has ended, stays open and
// counted.
func (d *Device) closeOnGPU(p *peer) error {
	var errs []error
	closed := func(err error) {
		if err == nil {
			d.imports.Add(-1)
			return
		}
		d.lose(err)
		errs = append(errs, d.alive())
	}
	for _, e := range p.events {
		if err := e.Destroy(); err == nil {
			d.imports.Add(-1)
		} else if driver.IsSticky(err) {
			closed(err)
		}
	}
	for _, a := range p.allocations {
		closed(driver.CloseMemory(a))
	}
	for i := range p.ranges {
		closed(p.ranges[i].Close())
	}
	return errors.Join(errs...)
}

// closeRest closes what is not on the GPU, after closeOnGPU. On a lost device the proof ends with
// the process: until then copies may touch the peer's memory.
func (p *peer) closeRest() {
	if p.d.alive() != nil {
		p.Proof = 0
	}
	if p.wordsRegion != nil {
		p.wordsRegion.Close()
	}
	p.closeStatm()
	p.Unmap()
}

// openVirtual maps the pieces of a region side by side. The region may end within the last
// granule of its last piece.
func (d *Device) openVirtual(p *peer, parts []cudaipc.Region) (*cudaipc.Opened, error) {
	granule, err := d.ctx.Granularity()
	if err != nil {
		return nil, err
	}
	var size uint64
	for i := range parts {
		if parts[i].Size%granule != 0 && i < len(parts)-1 {
			return nil, fmt.Errorf("piece %d: %d bytes, want a multiple of %d: %w", i, parts[i].Size, granule,
				cudaipc.ErrRange)
		}
		size += parts[i].Size
	}
	v, err := driver.NewRange(driver.Whole(size, granule))
	if err != nil {
		return nil, err
	}
	if err = fill(p, v, parts, granule); err == nil {
		err = d.ctx.Allow(v.Start, v.Size)
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	p.ranges = append(p.ranges, v)
	d.imports.Add(1)
	return &cudaipc.Opened{Size: size, Addr: uint64(v.Start)}, nil
}

func fill(p *peer, v *driver.Range, parts []cudaipc.Region, granule uint64) error {
	for i := range parts {
		if err := mapPiece(v, &parts[i], driver.Whole(parts[i].Size, granule)); err != nil {
			return fmt.Errorf("piece %d of %d: %w", i, len(parts), err)
		}
		if p.Dead() {
			return cudaipc.ErrPeerDead
		}
	}
	return nil
}

// mapPiece opens one descriptor and maps its memory, which the mapping then keeps.
func mapPiece(v *driver.Range, r *cudaipc.Region, size uint64) error {
	piece, err := driver.ImportPhysical(r.FD)
	if err != nil {
		return fmt.Errorf("%w: %w: the descriptor must be of cuMemExportToShareableHandle, "+
			"of memory that was made with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR "+
			"(PyTorch's expandable segments are; vLLM's sleep mode's is not: "+
			"start the engine without enable_sleep_mode), and on this GPU", cudaipc.ErrKind, err)
	}
	err = v.Map(piece, size)
	return errors.Join(err, piece.Release())
}
