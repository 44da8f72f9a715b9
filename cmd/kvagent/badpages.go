package main

import (
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/pool/dram"
)

// badPagesEvery is the shortest time between two lines about bad pages.
const badPagesEvery = time.Second

// badPages tells of pages of the pool that cannot be read.
type badPages struct {
	log *zap.Logger

	mu    sync.Mutex
	last  time.Time
	quiet int // pages since then that no line was about
}

func (b *badPages) tell(page dram.BadPage) {
	quiet, now := b.next(time.Now())
	if !now {
		return
	}
	b.log.Error("a page of the pool cannot be read: it is not used any more",
		zap.Int64("offset", page.Off), zap.Int64("bytes", page.Bytes), zap.Int("blocks_dropped", page.Dropped),
		zap.Int64("bad_pages", page.Pages), zap.Int("not_told", quiet))
}

// next reports whether a line may be written now, and how many were not since the last one.
func (b *badPages) next(now time.Time) (quiet int, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.last.IsZero() && now.Sub(b.last) < badPagesEvery {
		b.quiet++
		return 0, false
	}
	quiet, b.quiet, b.last = b.quiet, 0, now
	return quiet, true
}
