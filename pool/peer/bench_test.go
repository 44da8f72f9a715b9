package peer

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"
)

// BenchmarkFetch fetches over loopback between two pools of one process and, in turn, copies the
// same bytes between their arenas by plain TCP, over as many connections. It reports the median of
// the fetch's rate as a part of the copy's.
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
			plain := plainCopies(b, p.arena[:total], d.arena[:total], int(size))
			var ratios []float64
			b.SetBytes(total)
			for b.Loop() {
				r := d.request("", h)
				r.Groups = r.Groups[:1]
				began := time.Now()
				if got, err := client.Fetch(b.Context(), s.Addr().String(), r, nil); err != nil || got.Blocks != h.N {
					b.Fatalf("%+v, %v", got, err)
				}
				took := time.Since(began)
				b.StopTimer()
				began = time.Now()
				plain()
				ratios = append(ratios, time.Since(began).Seconds()/took.Seconds())
				_, err := d.ResetSpace(d.space)
				check(b, err)
				d.Sweep()
				b.StartTimer()
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "of-plain-TCP")
		})
	}
}

// plainCopies returns a function that copies all bytes, a block at a time, over as many connections
// as a client has.
func plainCopies(b *testing.B, from, to []byte, block int) (copyAll func()) {
	const streams = 2 // as a client has by default
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(b, err)
	defer l.Close()
	each := len(from) / streams
	var ends [streams][2]net.Conn
	for i := range ends {
		ends[i][0], err = net.Dial("tcp", l.Addr().String())
		check(b, err)
		ends[i][1], err = l.Accept()
		check(b, err)
		b.Cleanup(func() { _, _ = ends[i][0].Close(), ends[i][1].Close() })
	}
	return func() {
		var all sync.WaitGroup
		for i, end := range ends {
			all.Go(func() {
				for part := range slices.Chunk(from[i*each:][:each], block) {
					_, _ = end[0].Write(part) // an error ends the read
				}
			})
			all.Go(func() {
				for part := range slices.Chunk(to[i*each:][:each], block) {
					if _, err := io.ReadFull(end[1], part); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
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
