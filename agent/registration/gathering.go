// Package registration gathers the parts of an engine's registration, and checks every field
// against docs/PROTOCOL.md before any of the engine's memory is opened.
package registration

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer"
)

// Gathering is a registration whose parts have not all arrived. Its memory is not open yet.
type Gathering struct {
	Msg ipc.Register

	regionsLeft, segmentsLeft uint32 // still expected

	regions  map[uint32]ipc.RegionDesc // by ID; a region in pieces has their sum as its size
	pieces   []piece                   // all received, in order
	fds      []int                     // owned: what has come with the pieces
	gpu      cudaipc.UUID              // of the regions on a GPU; zero: there are none yet
	segments [][][]ipc.SegmentDesc     // by index of the shard held, and group
}

// piece is one element of REGIONS: a region, or a part of one.
type piece struct {
	desc ipc.RegionDesc
	fd   int // -1: none
}

// New begins a registration that has passed Check.
func New(m *ipc.Register) *Gathering {
	r := &Gathering{
		Msg: *m, regions: make(map[uint32]ipc.RegionDesc), regionsLeft: m.Regions, segmentsLeft: m.Segments,
	}
	for range m.Held {
		r.segments = append(r.segments, make([][]ipc.SegmentDesc, len(m.Groups)))
	}
	return r
}

// FDs returns the number of descriptors that r owns.
func (r *Gathering) FDs() int { return len(r.fds) }

// Size returns the number and the bytes of the regions; one in pieces counts once for each piece.
func (r *Gathering) Size() (count int, bytes int64) {
	for i := range r.pieces {
		bytes += int64(r.pieces[i].desc.Size)
	}
	return len(r.pieces), bytes
}

// Complete reports whether all parts have arrived.
func (r *Gathering) Complete() bool { return r.regionsLeft == 0 && r.segmentsLeft == 0 }

// AddRegions adds one REGIONS message, with as many descriptors as it names. r owns them from the
// call on, whatever comes of it.
func (r *Gathering) AddRegions(m *ipc.Regions, fds []int) (err error) {
	defer ipc.Guard(&err)
	r.fds = append(r.fds, fds...)
	if err := take("regions", &r.regionsLeft, len(m.List), r.Msg.Regions); err != nil {
		return err
	}
	for _, d := range m.List {
		if err := r.enter(&d); err != nil {
			return err
		}
		d.Handle = append([]byte(nil), d.Handle...) // it lies in the frame
		p := piece{d, -1}
		if kinds[d.Kind].fd {
			p.fd, fds = fds[0], fds[1:]
		}
		r.pieces = append(r.pieces, p)
	}
	return nil
}

// take subtracts n from what is left of all parts of a kind.
func take(parts string, left *uint32, n int, all uint32) error {
	if uint64(n) > uint64(*left) {
		return fmt.Errorf("%s: %d more, allowed: the %d that are left of %d", parts, n, *left, all)
	}
	*left -= uint32(n)
	return nil
}

// enter checks an element of REGIONS and adds it to the region that it forms with the pieces before
// it.
func (r *Gathering) enter(d *ipc.RegionDesc) error {
	if err := checkRegion(d); err != nil {
		return err
	}
	if gpu, on := gpuOf(d); on {
		if gpu == (cudaipc.UUID{}) {
			return fmt.Errorf("region %d.handle: no UUID, allowed: that of a GPU in its last 16 bytes", d.ID)
		}
		if r.gpu = cmp.Or(r.gpu, gpu); gpu != r.gpu {
			return fmt.Errorf("region %d.handle: on %v, allowed: %v, where the regions before it are; a worker's are "+
				"all on one GPU", d.ID, gpu, r.gpu)
		}
	}
	whole, there := r.regions[d.ID]
	if !there {
		r.regions[d.ID] = *d
		return nil
	}
	if last := &r.pieces[len(r.pieces)-1].desc; d.Kind != ipc.RegionCUDAFD || whole.Kind != d.Kind || last.ID != d.ID {
		return fmt.Errorf("region %d: named twice, allowed: each id once, but for pieces of kind %d next to each other",
			d.ID, ipc.RegionCUDAFD)
	}
	if d.Size > maxRegionBytes-whole.Size {
		return fmt.Errorf("region %d.size: %d in its pieces so far and %d more, allowed: at most %d in all", d.ID,
			whole.Size, d.Size, uint64(maxRegionBytes))
	}
	whole.Size += d.Size
	r.regions[d.ID] = whole
	return nil
}

// AddSegments adds one SEGMENTS message.
func (r *Gathering) AddSegments(m *ipc.Segments) (err error) {
	defer ipc.Guard(&err)
	if err := take("segments", &r.segmentsLeft, len(m.List), r.Msg.Segments); err != nil {
		return err
	}
	if int(m.Group) >= len(r.Msg.Groups) {
		return fmt.Errorf("segments: group %d, allowed: 0 to %d", m.Group, len(r.Msg.Groups)-1)
	}
	held := slices.Index(r.Msg.Held, m.Shard)
	if held < 0 {
		return fmt.Errorf("segments: shard %d, allowed: one of those held, %v", m.Shard, r.Msg.Held)
	}
	r.segments[held][m.Group] = append(r.segments[held][m.Group], m.List...)
	return nil
}

// Layouts checks that every block of every group lies in its regions, and returns where those of
// each shard held lie, and by shard and group the bytes of one block.
func (r *Gathering) Layouts() (held []transfer.Held, sizes [][]uint32, err error) {
	defer ipc.Guard(&err)
	for i, shard := range r.Msg.Held {
		layout, bytes, err := r.layout(r.segments[i])
		if err != nil {
			return nil, nil, fmt.Errorf("shard %d: %w", shard, err)
		}
		held, sizes = append(held, transfer.Held{Shard: uint8(shard), Layout: layout}), append(sizes, bytes)
	}
	if r.Msg.Sync != nil {
		err = checkSync(r.Msg.Sync, r.regions, r.gpu != (cudaipc.UUID{}))
	}
	return held, sizes, err
}

// layout returns where the blocks of one shard lie, and the bytes of one block of each group.
func (r *Gathering) layout(segments [][]ipc.SegmentDesc) (out transfer.Layout, sizes []uint32, err error) {
	for g, list := range segments {
		blocks := r.Msg.Groups[g].NumBlocks
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
			group.Segments[i] = transfer.Segment{Region: cudaipc.RegionID(s.Region), Offset: s.Offset, Stride: s.Stride,
				Bytes: s.Bytes}
			size += uint64(s.Bytes)
		}
		if size > maxShardBytes {
			return out, nil, fmt.Errorf("segments: group %d has %d bytes of one block, allowed: at most %d", g, size,
				uint64(maxShardBytes))
		}
		out.Groups, sizes = append(out.Groups, group), append(sizes, uint32(size))
	}
	return out, sizes, nil
}

// Imports returns the request to the device, which owns the descriptors from the call of Import on.
func (r *Gathering) Imports(pid int) cudaipc.Import {
	im := cudaipc.Import{Pid: pid, GPU: r.gpu}
	r.fds = nil
	for i := range r.pieces {
		d := &r.pieces[i].desc
		region := cudaipc.Region{ID: cudaipc.RegionID(d.ID), Kind: kinds[d.Kind].kind, Size: d.Size, FD: r.pieces[i].fd,
			Addr: d.Addr}
		if d.Kind == ipc.RegionCUDA {
			region.Handle = d.Handle[:cudaHandle]
		}
		im.Regions = append(im.Regions, region)
	}
	if s := r.Msg.Sync; s != nil {
		im.Sync = &cudaipc.Sync{
			Region: cudaipc.RegionID(s.Region), StepOff: s.StepOff, EventsOff: s.EventsOff, Events: s.Events,
			RevokeOff: s.RevokeOff, Revokes: s.Revokes,
		}
	}
	return im
}

// Drop closes the descriptors that r still owns.
func (r *Gathering) Drop() {
	CloseFDs(r.fds)
	r.fds = nil
}

// CloseFDs closes the descriptors of a message.
func CloseFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // nothing can be done about it, and nothing was written
	}
}

// Stages are what a worker declared for its staged loads.
type Stages struct {
	stages *transfer.Stages
	off    uint64 // of the words, in the sync region
	count  uint32
}

// wordBytes is the size of the word that counts the stages of a load.
const wordBytes = 8

// MakeStages checks what a worker declares against the layouts of its shards. An error comes with
// the name of the field.
func MakeStages(m *ipc.Stages, layouts []transfer.Held) (s *Stages, field string, err error) {
	if m.Off%wordBytes != 0 {
		return nil, "off", fmt.Errorf("%d, allowed is a multiple of %d", m.Off, wordBytes)
	}
	list := make([]uint16, len(m.List)/2)
	for i := range list {
		list[i] = binary.LittleEndian.Uint16(m.List[2*i:])
	}
	made, err := transfer.MakeStages(layouts, list)
	return &Stages{made, m.Off, m.Count}, "stages", err
}

// Load returns how a load that counts in a word is staged, or nil if there is no such word. Without
// stages there is none.
func (s *Stages) Load(word uint32) *transfer.Staged {
	if s == nil || word >= s.count {
		return nil
	}
	return &transfer.Staged{Stages: s.stages, Word: s.off + wordBytes*uint64(word)}
}

// WholeBlocks returns how many bytes whole blocks may have, so that the shards held of them have at
// most this many, whichever groups they are of. sizes are the bytes of one block, by shard, then
// group. It is at least 1.
func WholeBlocks(bytes int64, sizes [][]uint32, held []uint32) int64 {
	least := int64(math.MaxInt64)
	for g := range sizes[0] {
		var whole, part uint64
		for shard := range sizes {
			whole += uint64(sizes[shard][g])
		}
		for _, shard := range held {
			part += uint64(sizes[shard][g])
		}
		hi, lo := bits.Mul64(uint64(bytes), whole)
		if hi >= part {
			continue // more than any pool has
		}
		all, _ := bits.Div64(hi, lo, part)
		least = min(least, int64(min(all, math.MaxInt64)))
	}
	return max(least, 1)
}

// LargestBlock returns the bytes that a worker holds of one block, of the group where these are the
// most. sizes are those of its shards, by group.
func LargestBlock(sizes [][]uint32) (most int64) {
	if len(sizes) == 0 {
		return 0
	}
	for g := range sizes[0] {
		var sum int64
		for shard := range sizes {
			sum += int64(sizes[shard][g])
		}
		most = max(most, sum)
	}
	return most
}
