package disk

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// budget is a token bucket of bytes that survives the process. Bytes are recorded in a file before
// they are spent, a share at a time, so a kill can lose some of the budget and never exceed it.
type budget struct {
	mu     sync.Mutex
	path   string
	perDay int64 // 0: no bound
	now    func() time.Time

	tokens float64   // bytes that may be written, beyond noted; negative after a piece that exceeded it
	noted  float64   // bytes recorded as spent that are not spent yet
	at     time.Time // time of tokens
}

const (
	budgetName   = "budget"
	budgetBurst  = 8    // at most perDay/budgetBurst is saved up
	budgetShares = 1024 // the bytes recorded at once are perDay/budgetShares
)

func (b *budget) init(dir string, perDay int64, now func() time.Time) {
	b.path, b.perDay, b.now = filepath.Join(dir, budgetName), perDay, now
	b.at, b.tokens = now(), float64(perDay/budgetBurst)
}

// load continues with the state left by another process.
func (b *budget) load() {
	b.mu.Lock()
	defer b.mu.Unlock()
	text, err := os.ReadFile(b.path)
	if err != nil || b.perDay == 0 {
		return
	}
	var tokens float64
	var at int64
	if _, err := fmt.Sscanf(string(text), "v1 %g %d", &tokens, &at); err != nil {
		return // at worst the next process has a full budget
	}
	b.tokens, b.noted, b.at = min(tokens, float64(b.perDay/budgetBurst)), 0, time.Unix(0, at)
	b.refill()
}

func (b *budget) refill() {
	now := b.now()
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(b.tokens+d.Seconds()/86400*float64(b.perDay), float64(b.perDay/budgetBurst))
	}
	b.at = now // a clock that went back adds nothing
}

// has reports whether something may be written.
func (b *budget) has() bool {
	if b.perDay == 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill()
	return b.tokens+b.noted > 0
}

func (b *budget) spend(n int64) {
	if b.perDay == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.noted -= float64(n); b.noted >= 0 {
		return
	}
	b.refill()
	share := float64(b.perDay/budgetShares) - b.noted
	b.tokens -= share
	b.noted += share
	b.store()
}

// save returns what was recorded and not spent.
func (b *budget) save() {
	if b.perDay == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill()
	b.tokens += b.noted
	b.noted = 0
	b.store()
}

// store writes the file. An error is ignored: if it cannot be written, nothing else can be either.
func (b *budget) store() {
	text := fmt.Appendf(nil, "v1 %g %d\n", b.tokens, b.at.UnixNano())
	if os.WriteFile(b.path+".new", text, 0o600) == nil {
		_ = os.Rename(b.path+".new", b.path)
	}
}

// left returns how many bytes may be written now; -1 without a bound.
func (b *budget) left() int64 {
	if b.perDay == 0 {
		return -1
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refill()
	return int64(b.tokens + b.noted)
}
