package peer

import (
	"context"
	"fmt"
	"testing"
)

// BenchmarkFetch fetches over loopback between two pools of one process. `kvbench bench peer`
// compares two processes with a plain copy.
func BenchmarkFetch(b *testing.B) {
	for _, c := range []struct {
		auth Auth
		size uint32
	}{{testKey(b, 1), 64 << 10}, {testKey(b, 1), 1 << 20}, {tlsAuth(b), 1 << 20}} {
		size := c.size
		b.Run(fmt.Sprint(c.auth, " ", size>>10, "KiB"), func(b *testing.B) {
			const total = 64 << 20
			spec := specOf(1, size)
			p, d := newAgent(b, 3*total, spec), newAgent(b, 3*total, spec)
			h := chain("a", total/int(size))
			p.saveGroup(0, h, 1)
			cfg, ccfg := p.config(), d.clientConfig()
			cfg.Auth, ccfg.Auth = c.auth, c.auth
			s, client := serve(b, cfg), newClient(b, ccfg)
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

// BenchmarkPush measures the time from a block's commit at one side until it is committed at the
// other, whose fetch waits for it.
func BenchmarkPush(b *testing.B) {
	for _, size := range []uint32{64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size>>10, "KiB"), func(b *testing.B) {
			spec := specOf(1, size)
			p, d := newAgent(b, 64<<20, spec), newAgent(b, 64<<20, spec)
			s, client := serve(b, p.config()), newClient(b, d.clientConfig())
			p.set("r", Open, 0)
			const blocks = 1 << 14
			h := chain("a", blocks)
			arrived, done := make(chan struct{}, 1), make(chan struct{})
			ctx, cancel := context.WithCancel(b.Context())
			go func() {
				defer close(done)
				r := d.request("r", h)
				r.Groups = r.Groups[:1]
				_, _ = client.Fetch(ctx, s.Addr().String(), r, func(int, int64) { arrived <- struct{}{} })
			}()
			i := 0
			for b.Loop() {
				b.StopTimer()
				p.saveGroup(0, h.Slice(i, i+1), 1)
				i++
				b.StartTimer()
				p.change(func() {})
				<-arrived
			}
			cancel()
			<-done
		})
	}
}
