package registration

import (
	"fmt"
	"math/bits"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// checkRegion checks one region against the protocol.
func checkRegion(d *ipc.RegionDesc) error {
	field := fmt.Sprintf("region %d", d.ID)
	if err := inRange(field+".kind", uint64(d.Kind), ipc.RegionFD, ipc.RegionCUDAFD); err != nil {
		return err
	}
	if err := inRange(field+".size", d.Size, 1, maxRegionBytes); err != nil {
		return err
	}
	if d.Kind == ipc.RegionPeer {
		if d.Addr == 0 || d.Addr >= maxAddr || d.Size > maxAddr-d.Addr {
			return fmt.Errorf("%s.addr: %#x with %d bytes, allowed: a range between 1 and %#x", field, d.Addr, d.Size,
				uint64(maxAddr))
		}
	} else if d.Kind == ipc.RegionCUDA {
		if d.Addr > maxRegionBytes-d.Size {
			return fmt.Errorf("%s.addr: %d with %d bytes, allowed: at most %d together, from the beginning of the "+
				"allocation", field, d.Addr, d.Size, uint64(maxRegionBytes))
		}
	} else if d.Addr != 0 {
		return fmt.Errorf("%s.addr: %#x, allowed: 0 for kind %d", field, d.Addr, d.Kind)
	}
	if want := handleBytes(d.Kind); len(d.Handle) != want {
		return fmt.Errorf("%s.handle: %d bytes, allowed: %d for kind %d", field, len(d.Handle), want, d.Kind)
	}
	return nil
}

// handleBytes returns the length of a region's handle, which ends with a GPU's UUID.
func handleBytes(kind uint8) int {
	switch kind {
	case ipc.RegionCUDA:
		return cudaHandle + gpuUUID
	case ipc.RegionCUDAFD:
		return gpuUUID
	}
	return 0
}

// gpuOf returns the GPU of a checked region, and whether it is on one.
func gpuOf(d *ipc.RegionDesc) (gpu cudaipc.UUID, on bool) {
	n := handleBytes(d.Kind)
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
