package agent

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer"
)

// registration is one whose parts have not all come: the seat is taken, the memory is not open yet.
type registration struct {
	msg      ipc.Register
	seat     *seat
	regions  map[uint32]ipc.RegionDesc
	order    []uint32       // region ids as they came
	fds      map[uint32]int // descriptors by region id, owned
	segments [][]ipc.SegmentDesc
	left     parts
	timer    *time.Timer
}

// parts counts regions and segments of one registration.
type parts struct {
	req               uint32
	regions, segments uint32
}

func newRegistration(m *ipc.Register, st *seat) *registration {
	return &registration{
		msg: *m, seat: st, regions: make(map[uint32]ipc.RegionDesc), fds: make(map[uint32]int),
		segments: make([][]ipc.SegmentDesc, len(m.Groups)),
		left:     parts{req: m.Req, regions: m.Regions, segments: m.Segments},
	}
}

func (r *registration) complete() bool { return r.left.regions == 0 && r.left.segments == 0 }

// addRegions takes one REGIONS message; it owns the descriptors from now on.
func (r *registration) addRegions(m *ipc.Regions, fds []int) error {
	if left := r.left.regions; !take(&r.left.regions, len(m.List)) {
		closeFDs(fds)
		return fmt.Errorf("regions: %d more, allowed: the %d that are left of %d", len(m.List), left, r.msg.Regions)
	}
	for i := range m.List {
		d := m.List[i]
		_, withFD := importKind(d.Kind)
		if withFD && len(fds) == 0 {
			return fmt.Errorf("region %d: no descriptor came with it, allowed: one for each region of kind %d or %d", d.ID, ipc.RegionFD, ipc.RegionCUDAFD)
		}
		fd := -1
		if withFD {
			fd, fds = fds[0], fds[1:]
		}
		if err := r.addRegion(d, fd); err != nil {
			closeFDs(fds)
			return err
		}
	}
	if len(fds) > 0 {
		closeFDs(fds)
		return fmt.Errorf("regions: %d descriptors too many, allowed: one for each region of kind %d or %d", len(fds), ipc.RegionFD, ipc.RegionCUDAFD)
	}
	return nil
}

// take takes n off what is left, or all of it if that is less.
func take(left *uint32, n int) bool {
	if uint64(n) > uint64(*left) {
		*left = 0
		return false
	}
	*left -= uint32(n)
	return true
}

// addRegion owns fd, which is -1 for none.
func (r *registration) addRegion(d ipc.RegionDesc, fd int) error {
	err := checkRegion(&d)
	if _, twice := r.regions[d.ID]; twice && err == nil {
		err = fmt.Errorf("region %d: named twice, allowed: each id once", d.ID)
	}
	if err != nil {
		if fd >= 0 {
			closeFDs([]int{fd})
		}
		return err
	}
	d.Handle = append([]byte(nil), d.Handle...) // it lies in the frame
	r.regions[d.ID] = d
	r.order = append(r.order, d.ID)
	if fd >= 0 {
		r.fds[d.ID] = fd
	}
	return nil
}

// addSegments takes one SEGMENTS message.
func (r *registration) addSegments(m *ipc.Segments) error {
	if left := r.left.segments; !take(&r.left.segments, len(m.List)) {
		return fmt.Errorf("segments: %d more, allowed: the %d that are left of %d", len(m.List), left, r.msg.Segments)
	}
	if int(m.Group) >= len(r.segments) {
		return fmt.Errorf("segments: group %d, allowed: 0 to %d", m.Group, len(r.segments)-1)
	}
	r.segments[m.Group] = append(r.segments[m.Group], m.List...)
	return nil
}

// layout checks that every block of every group lies in its regions, and gives the worker's layout and the bytes
// of one block per group.
func (r *registration) layout() (transfer.Layout, []uint32, error) {
	var out transfer.Layout
	var sizes []uint32
	for g, list := range r.segments {
		blocks := r.msg.Groups[g].NumBlocks
		if len(list) == 0 {
			return out, nil, fmt.Errorf("segments: group %d has none, allowed: 1 or more for each group", g)
		}
		group := transfer.GroupLayout{NumBlocks: blocks, Segments: make([]transfer.Segment, len(list))}
		size := uint64(0)
		for i := range list {
			s := &list[i]
			if err := checkSegment(i, s, blocks, r.regions); err != nil {
				return out, nil, fmt.Errorf("group %d: %w", g, err)
			}
			group.Segments[i] = transfer.Segment{Region: cudaipc.RegionID(s.Region), Offset: s.Offset, Stride: s.Stride, Bytes: s.Bytes}
			size += uint64(s.Bytes)
		}
		if size > maxShardBytes {
			return out, nil, fmt.Errorf("segments: group %d has %d bytes of one block, allowed: at most %d", g, size, uint64(maxShardBytes))
		}
		out.Groups, sizes = append(out.Groups, group), append(sizes, uint32(size))
	}
	if r.msg.Sync != nil {
		if err := checkSync(r.msg.Sync, r.regions); err != nil {
			return out, nil, err
		}
	}
	return out, sizes, nil
}

// imports is the request to the device; the descriptors are the device's from the call of Import on.
func (r *registration) imports(peer cudaipc.PeerID, pid int) cudaipc.Import {
	im := cudaipc.Import{Peer: peer, Pid: pid}
	for _, id := range r.order {
		d := r.regions[id]
		kind, withFD := importKind(d.Kind)
		region := cudaipc.Region{ID: cudaipc.RegionID(id), Kind: kind, Size: d.Size, FD: -1, Addr: d.Addr, Handle: d.Handle}
		if withFD {
			region.FD = r.fds[id]
		}
		im.Regions = append(im.Regions, region)
	}
	if s := r.msg.Sync; s != nil {
		im.Sync = &cudaipc.Sync{
			Region: cudaipc.RegionID(s.Region), StepOff: s.StepOff, EventsOff: s.EventsOff, Events: s.Events,
			RevokeOff: s.RevokeOff, Revokes: s.Revokes,
		}
	}
	clear(r.fds)
	return im
}

// drop closes the descriptors that are still owned here.
func (r *registration) drop() {
	for _, fd := range r.fds {
		closeFDs([]int{fd})
	}
	clear(r.fds)
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // nothing can be done about it, and nothing was written
	}
}
