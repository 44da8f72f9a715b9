package mover

import "github.com/kvagent/kvagent/cudaipc"

// putImport encodes an import and lists its descriptors: the proof's, then the regions' in their
// order.
func putImport(b []byte, number uint64, im *cudaipc.Import) (msg []byte, fds []int) {
	b = putHead(b, msgImport, number)
	b = put32(b, uint32(im.Peer))
	b = put64(b, uint64(int64(im.Pid)))
	b = append(b, im.GPU[:]...)
	b = put8(b, im.Proof > 0)
	if im.Proof > 0 {
		fds = append(fds, im.Proof)
	}
	b = put8(b, im.Sync != nil)
	if s := im.Sync; s != nil {
		b = put32(b, uint32(s.Region))
		b = put64(b, s.StepOff)
		b = put32(put64(b, s.EventsOff), s.Events)
		b = put32(put64(b, s.RevokeOff), s.Revokes)
	}
	b = put32(b, uint32(len(im.Regions)))
	for i := range im.Regions {
		r := &im.Regions[i]
		b = append(put32(b, uint32(r.ID)), byte(r.Kind))
		b = put64(put64(b, r.Size), r.Addr)
		b = putText(b, string(r.Handle))
		if r.HasFD() {
			fds = append(fds, r.FD)
		}
	}
	return b, fds
}

const (
	importRegion = 25 // least bytes of a region in an import
	// maxHandle is the longest handle of a region that is carried, bytes.
	maxHandle = 256
)

// takeImport decodes an import. It owns the descriptors unless there is an error; then they stay
// the caller's.
func takeImport(f *fields, fds []int) (cudaipc.Import, error) {
	im := cudaipc.Import{Peer: cudaipc.PeerID(f.u32()), Pid: int(int64(f.u64()))}
	copy(im.GPU[:], f.take(len(im.GPU)))
	left := fds
	next := func() int {
		if len(left) == 0 {
			f.bad = true
			return -1
		}
		fd := left[0]
		left = left[1:]
		return fd
	}
	if f.flag() {
		im.Proof = next()
	}
	if f.flag() {
		im.Sync = &cudaipc.Sync{Region: cudaipc.RegionID(f.u32()), StepOff: f.u64()}
		im.Sync.EventsOff, im.Sync.Events = f.u64(), f.u32()
		im.Sync.RevokeOff, im.Sync.Revokes = f.u64(), f.u32()
	}
	im.Regions = make([]cudaipc.Region, f.count(importRegion))
	for i := range im.Regions {
		r := &im.Regions[i]
		r.ID, r.Kind, r.FD = cudaipc.RegionID(f.u32()), cudaipc.Kind(f.u8()), -1
		r.Size, r.Addr = f.u64(), f.u64()
		if handle := f.bytes(); len(handle) > 0 {
			r.Handle = append([]byte(nil), handle...)
		}
		if r.HasFD() {
			r.FD = next()
		}
	}
	if len(left) > 0 {
		f.bad = true
	}
	return im, f.end("import")
}
