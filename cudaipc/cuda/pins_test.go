//go:build cuda

package cuda_test

import (
	"bytes"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestCUDAPartlyPinned pins some pieces of an arena. It expects their bytes to be copied directly
// and those of the others through the ring, also of one run that lies in both.
func TestCUDAPartlyPinned(t *testing.T) {
	const piece, pieces = 64 << 10, 8
	// Another device has pinned a piece in the middle: there the pinning ends.
	outer := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, func(o *cuda.Options) { o.NoPin = true })
	inner := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, func(o *cuda.Options) {
		o.Arena = outer.Arena[3*piece : 4*piece]
	})
	devicetest.Pinned(t, inner.Device.(*cuda.Device))
	b := newBench(t, devicetest.Spec{Regions: []int64{pieces * piece}}, func(o *cuda.Options) {
		o.Arena, o.PinPiece, o.Ring = outer.Arena[:pieces*piece], piece, 1<<16
	})
	b.arena = outer.Arena
	devicetest.Pinned(t, b.device)
	if i := b.device.Info(); i.Pinned != 3*piece || i.Refused != 5*piece || i.PinError == "" {
		t.Fatalf("%+v, want three pieces pinned and five refused", i)
	}
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: pieces * piece, Seed: 8})
	for _, test := range []struct {
		run  cudaipc.Run
		ring uint64 // bytes that go through it
	}{
		{cudaipc.Run{Region: 1, Len: piece}, 0},
		{cudaipc.Run{Region: 1, RegionOff: piece, ArenaOff: piece, Len: 2 * piece}, 0},
		{cudaipc.Run{Region: 1, RegionOff: 5 * piece, ArenaOff: 5 * piece, Len: piece}, piece},
		{cudaipc.Run{Region: 1, RegionOff: 2 * piece, ArenaOff: 2 * piece, Len: 3 * piece}, 2 * piece},
	} {
		for _, dir := range []cudaipc.Direction{cudaipc.Gather, cudaipc.Scatter} {
			before := b.device.Info().RingBytes
			b.copy(dir, test.run)
			if got := b.device.Info().RingBytes - before; got != test.ring {
				t.Errorf("%d bytes at %d, direction %d: %d through the ring, want %d", test.run.Len, test.run.ArenaOff,
					dir, got, test.ring)
			}
		}
		from, to := test.run.ArenaOff, test.run.ArenaOff+int64(test.run.Len)
		if want := pattern(8, pieces*piece)[from:to]; !bytes.Equal(b.arena[from:to], want) {
			t.Errorf("%d bytes at %d are wrong", test.run.Len, test.run.ArenaOff)
		}
	}
	if got := b.do(devicetest.Op{
		Kind:   devicetest.Read,
		Region: 1,
		Len:    pieces * piece,
	}); !bytes.Equal(got, pattern(8, pieces*piece)) {
		t.Error("the region has other bytes after the scatters")
	}
}
