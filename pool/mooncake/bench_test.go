package mooncake

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// Blocks of 1 MiB, in place and through the bounce memory.
func BenchmarkPutGet(b *testing.B) {
	for name, arena := range map[string]bool{"arena": true, "bounce": false} {
		b.Run(name, func(b *testing.B) { benchPutGet(b, arena) })
	}
}

func benchPutGet(b *testing.B, arena bool) {
	master, python := servertest.Mooncake(b)
	o := options(b, master, python)
	o.Segment, o.Arena, o.Bounce = 256<<20, arenaOf(b, 8<<20), 128<<20
	s := openWith(b, o)
	items := pooltest.Blocks(0, 8, 1<<20)
	if arena {
		items = inArena(o.Arena, items)
	}
	if err := s.Put(b.Context(), items); err != nil || items[0].Status != pool.OK {
		b.Fatal(err, items[0].Status)
	}
	b.SetBytes(8 << 20)
	for b.Loop() {
		if err := s.Get(b.Context(), items); err != nil || items[0].Status != pool.OK {
			b.Fatal(err, items[0].Status)
		}
	}
}

// Exists of 128 keys: one question.
func BenchmarkExists(b *testing.B) {
	s, _ := openOne(b)
	keys, status := make([]pool.Key, 128), make([]pool.Status, 128)
	for i := range keys {
		keys[i] = pooltest.Block(i, 0).Key
	}
	for b.Loop() {
		if err := s.Exists(b.Context(), keys, status); err != nil {
			b.Fatal(err)
		}
	}
}
