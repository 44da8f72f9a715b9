package dram

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

const benchChainLen = 128

func randomChain(blob []byte, number, n int) pool.Hashes {
	r := rand.New(rand.NewPCG(uint64(number), 7))
	for range n * pool.MaxHashLen / 8 {
		blob = binary.LittleEndian.AppendUint64(blob, r.Uint64())
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// filled is a pool without data whose index holds n blocks.
func filled(b testing.TB, n int) *Pool { return filledFor(b, n, "") }

// filledFor is filled with blocks of an owner; of nobody without a name.
func filledFor(b testing.TB, n int, name string) *Pool {
	p, err := Open(Options{Bytes: int64(n+n/8)*1024 + 64<<20, Virtual: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { p.Close() })
	if _, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1024}}}}); err != nil {
		b.Fatal(err)
	}
	var o pool.Owner
	if name != "" {
		o = openOwner(b, p, name, 0)
	}
	for first := 0; first < n; first += benchChainLen {
		h := randomChain(nil, first/benchChainLen, benchChainLen)
		batch := pool.Batch{
			Epoch: 1, Owner: o, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
		}
		p.Reserve(&batch)
		p.Commit(batch.Slots, 1, batch.Status)
	}
	return p
}

// reportCPU reports processor time per block: on a busy machine wall time says little.
func reportCPU(b *testing.B, blocks int) func() {
	var start, end unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &start); err != nil {
		b.Fatal(err)
	}
	return func() {
		if err := unix.Getrusage(unix.RUSAGE_SELF, &end); err != nil {
			b.Fatal(err)
		}
		spent := end.Utime.Nano() - start.Utime.Nano() + end.Stime.Nano() - start.Stime.Nano()
		b.ReportMetric(float64(spent)/float64(b.N*blocks), "cpu-ns/block")
	}
}

func BenchmarkExists(b *testing.B) {
	for _, n := range []int{10_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := filled(b, n)
			queries := drawChains(n, 4096)
			present := make([]bool, benchChainLen)
			report := reportCPU(b, benchChainLen)
			for i := 0; b.Loop(); i++ {
				p.Exists(0, 0, queries[i%len(queries)], present)
			}
			report()
		})
	}
}

func BenchmarkPrefix(b *testing.B) { benchPrefix(b, "") }

// BenchmarkPrefixOwned looks up blocks of an owner, which are in its order too.
func BenchmarkPrefixOwned(b *testing.B) { benchPrefix(b, "one") }

func benchPrefix(b *testing.B, owner string) {
	p := filledFor(b, 1_000_000, owner)
	queries := drawChains(1_000_000, 4096)
	report := reportCPU(b, benchChainLen)
	for i := 0; b.Loop(); i++ {
		p.Prefix(0, 0, queries[i%len(queries)])
	}
	report()
}

// BenchmarkPin pins and unpins a prompt of 2,048 blocks.
func BenchmarkPin(b *testing.B) {
	for _, n := range []int{10_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := filled(b, n)
			queries := drawChains(n, 4096)
			refs := make([]pool.Ref, 0, 2048)
			long := make([]pool.Hashes, len(queries)/16)
			for i := range long {
				long[i] = pool.Chain(queries[i*16].Blob[:2048*pool.MaxHashLen], pool.MaxHashLen)
			}
			report := reportCPU(b, 2048)
			for i := 0; b.Loop(); i++ {
				got, pinned, _ := p.Pin(0, 0, long[i%len(long)], 1<<40, refs)
				if got != 2048 {
					b.Fatal(got)
				}
				p.Unpin(pinned)
			}
			report()
		})
	}
}

// BenchmarkStore stores chains in a full pool of 289,000 blocks, so that each evicts as many: for
// nobody, for an owner without a budget, and for one at its budget of half the pool.
func BenchmarkStore(b *testing.B) {
	for _, c := range []struct {
		name   string
		owner  string
		budget int64
	}{{"nobody", "", 0}, {"an owner", "one", 0}, {"at its budget", "one", 50_000 << 10}} {
		b.Run(c.name, func(b *testing.B) {
			p := filled(b, 200_000)
			var o pool.Owner
			if c.owner != "" {
				o = openOwner(b, p, c.owner, int(c.budget>>10))
			}
			status, slots := make([]pool.Status, benchChainLen), make([]pool.Slot, benchChainLen)
			blob := make([]byte, 0, benchChainLen*pool.MaxHashLen)
			store := func(i int) {
				h := randomChain(blob, 1_000_000+i, benchChainLen)
				batch := pool.Batch{Epoch: 1, Owner: o, Hashes: h, Status: status, Slots: slots}
				p.Reserve(&batch)
				p.Commit(slots, 1, status)
				if status[benchChainLen-1] != pool.OK {
					b.Fatal(status)
				}
			}
			const fill = 4000
			for i := range fill { // until the pool, or the owner, is full
				store(i)
			}
			report := reportCPU(b, benchChainLen)
			for i := fill; b.Loop(); i++ {
				store(i)
			}
			report()
		})
	}
}

// drawChains returns stored chains in random order, contiguous in memory.
func drawChains(stored, n int) (queries []pool.Hashes) {
	r := rand.New(rand.NewPCG(1, 1))
	blob := make([]byte, 0, n*benchChainLen*pool.MaxHashLen)
	for range n {
		at := len(blob)
		blob = randomChain(blob, r.IntN(stored/benchChainLen), benchChainLen).Blob
		h := pool.Chain(blob[at:], pool.MaxHashLen)
		h.Blob = blob[at:cap(blob)]
		queries = append(queries, h)
	}
	return queries
}
