package registration

import (
	"cmp"
	"fmt"
	"math/bits"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
)

// Limits of a registration's fields besides those of package ipc.
const (
	maxBlockTokens = 1 << 20 // tokens of one block
	maxAlign       = 1 << 24 // least common multiple of the block sizes of a space, tokens
	maxBlocks      = 1 << 28 // blocks of one group of an engine
	maxShardBytes  = 1 << 30 // bytes of one block of one shard
	maxRegionBytes = 1 << 46
	maxAddr        = 1 << 47 // end of a process's address space
	cudaHandle     = 64      // bytes of a CUDA IPC handle
	gpuUUID        = 16      // bytes of a GPU's UUID, at the end of a region's handle
)

// Check checks a REGISTER against docs/PROTOCOL.md, beyond the ranges of single fields, which
// package ipc has checked. Its errors name the field, the value and what is allowed; they are the
// text of the refusal.
func Check(r *ipc.Register, dir string) (err error) {
	defer ipc.Guard(&err)
	if strings.ContainsFunc(r.Instance, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		return fmt.Errorf("instance: %q, allowed: UTF-8 without control characters", r.Instance)
	}
	return cmp.Or(checkPlace(r), checkIdentity(r.Identity), checkGroups(r.HashTokens, r.Groups),
		checkLookupName(dir, r.LookupName), checkParts(r))
}

// inRange returns an error if an integer field is not within low and high.
func inRange(field string, v, low, high uint64) error {
	if v < low || v > high {
		return fmt.Errorf("%s: %d, allowed: %d to %d", field, v, low, high)
	}
	return nil
}

func checkPlace(r *ipc.Register) error {
	if err := inRange("rank", uint64(r.Rank), 0, uint64(r.World)-1); err != nil {
		return err
	}
	for i, shard := range r.Held {
		if err := inRange(fmt.Sprintf("held[%d]", i), uint64(shard), 0, uint64(r.Shards)-1); err != nil {
			return err
		}
		if i > 0 && shard <= r.Held[i-1] {
			return fmt.Errorf("held[%d]: %d after %d, allowed: ascending, no shard twice", i, shard, r.Held[i-1])
		}
	}
	return nil
}

func checkIdentity(pairs []ipc.Pair) error {
	for _, key := range []string{"model", "dtype", "tenant"} {
		i := slices.IndexFunc(pairs, func(p ipc.Pair) bool { return p.Key == key })
		if i < 0 || pairs[i].Value == "" && key != "tenant" {
			return fmt.Errorf("identity: no %s, allowed: model, dtype and tenant must be there, of which only tenant "+
				"may be empty", key)
		}
	}
	return nil
}

func checkGroups(hashTokens uint32, groups []ipc.GroupDesc) error {
	if err := inRange("hash_tokens", uint64(hashTokens), 1, maxBlockTokens); err != nil {
		return err
	}
	align := uint64(1)
	for i, g := range groups {
		if err := inRange(fmt.Sprintf("groups[%d].block_tokens", i), uint64(g.BlockTokens), 1,
			maxBlockTokens); err != nil {
			return err
		}
		if g.BlockTokens%hashTokens != 0 {
			return fmt.Errorf("groups[%d].block_tokens: %d, allowed: a multiple of hash_tokens (%d)", i, g.BlockTokens,
				hashTokens)
		}
		if err := inRange(fmt.Sprintf("groups[%d].num_blocks", i), uint64(g.NumBlocks), 1, maxBlocks); err != nil {
			return err
		}
		if align = lcm(align, uint64(g.BlockTokens)); align > maxAlign {
			return fmt.Errorf("groups[%d].block_tokens: %d makes the least common multiple of all %d, allowed: at "+
				"most %d", i, g.BlockTokens, align, maxAlign)
		}
	}
	return nil
}

// lcm returns the least common multiple. The caller has checked that the product fits.
func lcm(a, b uint64) uint64 {
	x, y := a, b
	for y != 0 {
		x, y = y, x%y
	}
	return a / x * b
}

// checkParts checks what comes with a registration, of which a scheduler has nothing.
func checkParts(r *ipc.Register) error {
	regions, segments, held := uint64(r.Regions), uint64(r.Segments), uint64(len(r.Held))
	if r.Role == ipc.RoleWorker {
		return cmp.Or(inRange("regions", regions, 1, ipc.MaxRegions), inRange("held", held, 1, uint64(r.Shards)),
			inRange("segments", segments, uint64(len(r.Groups))*held, ipc.MaxSegments))
	}
	if r.Sync != nil {
		return fmt.Errorf("sync: given, allowed: none for a scheduler")
	}
	return cmp.Or(inRange("rank", uint64(r.Rank), 0, 0), inRange("held", held, 0, 0), inRange("regions", regions, 0, 0),
		inRange("segments", segments, 0, 0))
}

// kinds are the protocol's kinds of regions: the device's kind, whether a descriptor comes with it,
// and the length of its handle, which ends with a GPU's UUID.
var kinds = map[uint8]struct {
	kind   cudaipc.Kind
	fd     bool
	handle int
}{
	ipc.RegionFD: {cudaipc.KindFD, true, 0}, ipc.RegionPeer: {cudaipc.KindPeer, false, 0},
	ipc.RegionCUDA:   {cudaipc.KindCUDA, false, cudaHandle + gpuUUID},
	ipc.RegionCUDAFD: {cudaipc.KindCUDAFD, true, gpuUUID},
}

// checkLookupName returns an error unless a client may have a look-up socket of that name in dir.
func checkLookupName(dir, name string) error {
	if name == "" { // it wants none
		return nil
	}
	if err := socketdir.CheckName(name); err != nil {
		return err
	}
	if n := len(filepath.Join(dir, name)); n > ipc.MaxSocketPath {
		return fmt.Errorf("lookup_name: its path has %d bytes, allowed: at most %d (the directory's has %d)", n,
			ipc.MaxSocketPath, len(dir))
	}
	return nil
}

// checkRegion checks one region against the protocol.
func checkRegion(d *ipc.RegionDesc) error {
	field := fmt.Sprintf("region %d", d.ID)
	if err := inRange(field+".size", d.Size, 1, maxRegionBytes); err != nil {
		return err
	}
	low, high := uint64(0), uint64(0) // of a piece of memory that a descriptor or a handle names
	switch d.Kind {
	case ipc.RegionPeer:
		low, high = 1, maxAddr-d.Size
	case ipc.RegionCUDA: // from the beginning of the allocation
		high = maxRegionBytes - d.Size
	}
	if err := inRange(field+".addr", d.Addr, low, high); err != nil {
		return err
	}
	if want := kinds[d.Kind].handle; len(d.Handle) != want {
		return fmt.Errorf("%s.handle: %d bytes, allowed: %d for kind %d", field, len(d.Handle), want, d.Kind)
	}
	return nil
}

// gpuOf returns the GPU of a checked region, and whether it is on one.
func gpuOf(d *ipc.RegionDesc) (gpu cudaipc.UUID, on bool) {
	n := len(d.Handle)
	if n == 0 {
		return gpu, false
	}
	copy(gpu[:], d.Handle[n-gpuUUID:])
	return gpu, true
}

// checkSegment checks that the piece of every block lies in its region. No sum can wrap.
func checkSegment(i int, s *ipc.SegmentDesc, numBlocks uint32, regions map[uint32]ipc.RegionDesc) error {
	r, ok := regions[s.Region]
	if !ok {
		return fmt.Errorf("segment %d.region: %d, allowed: a region of this registration", i, s.Region)
	}
	if err := inRange(fmt.Sprintf("segment %d.bytes", i), uint64(s.Bytes), 1, maxShardBytes); err != nil {
		return err
	}
	if numBlocks > 1 && s.Stride < uint64(s.Bytes) {
		return fmt.Errorf("segment %d.stride: %d, allowed: %d (its bytes) or more", i, s.Stride, s.Bytes)
	}
	if !inside(s.Offset, s.Stride, uint64(numBlocks-1), uint64(s.Bytes), r.Size) {
		return fmt.Errorf("segment %d: offset %d, stride %d, %d bytes of %d blocks, allowed: inside of region %d (%d "+
			"bytes)",
			i, s.Offset, s.Stride, s.Bytes, numBlocks, s.Region, r.Size)
	}
	return nil
}

// inside reports whether offset + count*stride + size is at most limit, without wrapping.
func inside(offset, stride, count, size, limit uint64) bool {
	over, run := bits.Mul64(stride, count)
	end, c1 := bits.Add64(offset, run, 0)
	end, c2 := bits.Add64(end, size, 0)
	return over == 0 && c1 == 0 && c2 == 0 && end <= limit
}

// Sizes of a sync region's words, and what they are aligned to.
const (
	stepBytes   = 8
	eventAlign  = 8
	revokeBytes = 4
)

// checkSync checks that all words lie in their region and are naturally aligned. onGPU means that
// the events are a GPU's.
func checkSync(s *ipc.SyncDesc, regions map[uint32]ipc.RegionDesc, onGPU bool) error {
	eventBytes := uint64(cudaipc.EventCell)
	if onGPU {
		eventBytes = cudaipc.CUDAEventCell
	}
	r, ok := regions[s.Region]
	if !ok {
		return fmt.Errorf("sync.region: %d, allowed: a region of this registration", s.Region)
	}
	if r.Kind != ipc.RegionFD {
		return fmt.Errorf("sync.region: %d is of kind %d, allowed: kind %d", s.Region, r.Kind, ipc.RegionFD)
	}
	for _, w := range []struct {
		field              string
		off, n, size, unit uint64
	}{
		{"sync.step_off", s.StepOff, 1, stepBytes, stepBytes},
		{"sync.events_off", s.EventsOff, uint64(s.Events), eventBytes, eventAlign},
		{"sync.revoke_off", s.RevokeOff, uint64(s.Revokes), revokeBytes, revokeBytes},
	} {
		if w.n == 0 {
			continue
		}
		if w.off%w.unit != 0 {
			return fmt.Errorf("%s: %d, allowed: a multiple of %d", w.field, w.off, w.unit)
		}
		if !inside(w.off, w.size, w.n, 0, r.Size) {
			return fmt.Errorf("%s: %d with %d words, allowed: inside of region %d (%d bytes)", w.field, w.off, w.n,
				s.Region, r.Size)
		}
	}
	return nil
}
