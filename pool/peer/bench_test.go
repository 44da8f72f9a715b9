package peer

import (
	"fmt"
	"testing"
)

// BenchmarkFetch fetches over loopback between two pools of one process. `kvbench bench peer`
// compares two processes with a plain copy.
func BenchmarkFetch(b *testing.B) {
	for _, size := range []uint32{64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size>>10, "KiB"), func(b *testing.B) {
			const total = 64 << 20
			spec := specOf(1, size)
			p, d := newAgent(b, 3*total, spec), newAgent(b, 3*total, spec)
			h := chain("a", total/int(size))
			p.saveGroup(0, h, 1)
			s, client := serve(b, p.config()), newClient(b, d.clientConfig())
			b.SetBytes(total)
			for b.Loop() {
				r := d.request("", h)
				r.Groups = r.Groups[:1]
				if got, err := client.Fetch(b.Context(), s.Addr().String(), r, nil); err != nil || got.Blocks != h.N {
					b.Fatalf("%+v, %v", got, err)
				}
				b.StopTimer()
				_, err := d.ResetSpace(d.space)
				check(b, err)
				d.Sweep()
				b.StartTimer()
			}
		})
	}
}
