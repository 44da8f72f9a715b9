//go:build cuda

package cuda_test

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// byKernel is a copy table that names the kernel for all runs.
var byKernel = cudaipc.CopyTable{Rules: []cudaipc.CopyRule{{
	UpTo: math.MaxUint64,
	Flat: cudaipc.CopyKernel,
	Rows: cudaipc.CopyKernel,
}}}

func useKernel(o *cuda.Options) { o.Table = &byKernel }

// TestCUDAKernelBytes copies runs of odd lengths between odd places both ways, some of them more
// than a list has room for.
func TestCUDAKernelBytes(t *testing.T) {
	const n = 4 << 20
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	b := newBench(t, devicetest.Spec{Regions: []int64{n, n}}, useKernel)
	devicetest.Pinned(t, b.device) // what is not pinned goes through the rings, and not by the kernel
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: n, Seed: 1})
	source := pattern(1, n)
	want := bytes.Repeat([]byte{0xee}, n)
	copy(b.arena, want)
	var out, in []cudaipc.Run
	for at := 0; at < n-300; {
		length := 1 + rng.IntN(200)
		from := rng.IntN(n - length)
		out = append(out, cudaipc.Run{Region: 1, RegionOff: uint64(from), ArenaOff: int64(at), Len: uint32(length)})
		in = append(in, cudaipc.Run{Region: 2, RegionOff: uint64(at), ArenaOff: int64(at), Len: uint32(length)})
		copy(want[at:], source[from:from+length])
		at += length + rng.IntN(30)
	}
	b.copy(cudaipc.Gather, out...)
	if !bytes.Equal(b.arena[:n], want) {
		t.Fatal("bytes gathered by the kernel are wrong")
	}
	b.copy(cudaipc.Scatter, in...)
	got := b.do(devicetest.Op{Kind: devicetest.Read, Region: 2, Len: n})
	for _, r := range in {
		if at := r.RegionOff; !bytes.Equal(got[at:at+uint64(r.Len)], want[at:at+uint64(r.Len)]) {
			t.Fatalf("%d bytes at %d scattered by the kernel are wrong", r.Len, at)
		}
	}
	info := b.device.Info()
	if info.Kernels < 4 || info.Singles+info.Batches+info.Rects != 0 {
		t.Errorf("%d launches for %d runs each way, and %d other calls; want several, and none", info.Kernels, len(out),
			info.Singles+info.Batches+info.Rects)
	}
}

// TestCUDAKernelRows expects rows at constant distances to be entries of a list, beyond its end
// too.
func TestCUDAKernelRows(t *testing.T) {
	const width, pitch, rows = 48, 96, 40_000
	b := newBench(t, devicetest.Spec{Regions: []int64{rows * pitch}}, useKernel)
	devicetest.Pinned(t, b.device)
	b.do(devicetest.Op{Kind: devicetest.Fill, Region: 1, Len: rows * pitch, Seed: 5})
	source := pattern(5, rows*pitch)
	var runs []cudaipc.Run
	for i := range rows {
		runs = append(runs, cudaipc.Run{
			Region:    1,
			RegionOff: uint64(i * pitch),
			ArenaOff:  int64(i * width),
			Len:       width,
		})
	}
	b.copy(cudaipc.Gather, runs...)
	for i := range rows {
		if !bytes.Equal(b.arena[i*width:(i+1)*width], source[i*pitch:i*pitch+width]) {
			t.Fatalf("row %d is wrong", i)
		}
	}
	if got := b.device.Info().Kernels; got < 3 {
		t.Errorf("%d launches for %d rows", got, rows)
	}
}

// TestCUDACalibrateMeasuresTheKernel where it is asked to, and unloads it.
func TestCUDACalibrateMeasuresTheKernel(t *testing.T) {
	f := devicetest.CUDA(t, devicetest.MinArena, cudaipc.KindCUDA, func(o *cuda.Options) { o.MeasureKernel = true })
	device := f.Device.(*cuda.Device)
	calls := devicetest.NoteCalls(t, device)
	table, err := device.Calibrate(time.Minute)
	if err == nil {
		err = table.Check()
	}
	if err != nil {
		t.Fatal(err)
	}
	if n := calls(); n["cuLaunchKernel"] == 0 || n["cuModuleLoadData"] != 1 || n["cuModuleUnload"] != 1 {
		t.Errorf("%d launches of a module that was loaded %d and unloaded %d times", n["cuLaunchKernel"],
			n["cuModuleLoadData"], n["cuModuleUnload"])
	}
}
