package evict

import "github.com/kvagent/kvagent/pool"

const (
	longestPause = 20_000 // ms that pass at most between two events: nothing is used in a pause
	perUnit      = 1      // ms that pass at least for unitTokens tokens looked up
)

// clock is the time in ms by which blocks age: the pool's time without long pauses, at a minimum
// rate per block looked up. It is monotonic.
type clock struct {
	now     int64
	skipped int64 // ms of pauses left out
	heard   bool
}

// advance returns the time for a pool's clock in ns.
func (c *clock) advance(ns int64) uint32 {
	at := ns/1e6 - c.skipped
	if !c.heard {
		c.heard, c.skipped, at = true, at-c.now, c.now
	}
	if pause := at - c.now; pause > longestPause {
		c.skipped += pause - longestPause
		at = c.now + longestPause
	}
	c.now = max(c.now, at)
	return uint32(c.now)
}

// tick returns a time later than all before it.
func (c *clock) tick() uint32 {
	c.now++
	return uint32(c.now)
}

// advanceBy returns the time of a look-up, which is later than all before it.
func (c *clock) advanceBy(u *pool.Use) uint32 {
	before, tokens := c.now, int64(u.BlockTokens)
	if tokens == 0 {
		tokens = unitTokens
	}
	c.advance(u.Now)
	c.now = max(c.now, before+max(1, int64(len(u.Prints))*tokens*perUnit/unitTokens))
	return uint32(c.now)
}
