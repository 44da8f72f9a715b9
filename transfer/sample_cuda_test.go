//go:build cuda

package transfer

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// TestCUDASampleCatchesWrongCopies is TestSampleCatchesWrongCopies on a GPU: opened here, in a
// mover, and with memory in pieces.
func TestCUDASampleCatchesWrongCopies(t *testing.T) {
	for name, kind := range map[string]cudaipc.Kind{"handles": cudaipc.KindCUDA, "virtual": cudaipc.KindCUDAFD} {
		engine := func(t devicetest.T, s devicetest.Spec) devicetest.Engine { return devicetest.CUDAEngine(t, s, kind) }
		t.Run(name, func(t *testing.T) {
			catchesWrongCopies(t, openSampled{engine: engine, device: onCUDA})
		})
		t.Run(name+" in a mover", func(t *testing.T) {
			catchesWrongCopies(t, openSampled{engine: engine, device: func(fd int, size int64) (cudaipc.Device,
				error) {
				return mover.New(mover.Options{
					Name: "test", Device: cudaipc.CUDADevice, ArenaFD: fd, ArenaSize: size,
					Command: devicetest.MoverCommand, Env: devicetest.MoverEnv, Node: -1,
				})
			}})
		})
	}
}

// BenchmarkCUDASampling is BenchmarkSampling on a GPU, opened here.
func BenchmarkCUDASampling(b *testing.B) {
	benchSampling(b, openSampled{
		engine: func(t devicetest.T, s devicetest.Spec) devicetest.Engine {
			return devicetest.CUDAEngine(t, s, cudaipc.KindCUDA)
		},
		device: onCUDA,
	})
}

// openCUDA opens the only GPU on an arena, which stays mapped.
func openCUDA(fd int, size int64) (*cuda.Device, error) {
	arena, err := cudaipc.MapFD(fd, size)
	if err != nil {
		return nil, err
	}
	return cuda.Open(cuda.Options{Arena: arena})
}

func onCUDA(fd int, size int64) (cudaipc.Device, error) { return openCUDA(fd, size) }
