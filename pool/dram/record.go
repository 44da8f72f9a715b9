package dram

// record is the header of an entry: one cache line. Records are named by their index; 0 is none.
type record struct {
	hash  key // the block hash, zero behind its length
	ident ident
	hold  uint32 // pins<<pinShift | flags

	newer, older uint32 // in the list the entry is in: recent, or one of the partial ones; free records: older
	child        uint32 // first of the entries that hang on this one
	next, prev   uint32 // siblings; prev of the first is its parent with upward set, of a root 0
	head         uint32 // slot of shard 0
}

// life is the part of a header that only reservations and references need.
type life struct {
	generation       uint32 // of the record; part of its refs; never 0 in use
	present, writing uint16 // bit per shard
}

// ident is what a key has besides its hash: realm<<9 | group<<5 | hash length-1.
type ident uint32

const maxRealms = 1 << 23

func makeIdent(realm uint32, group uint8, hashLen int) ident {
	return ident(realm<<9 | uint32(group)<<5 | uint32(hashLen-1))
}

func (i ident) realm() uint32  { return uint32(i) >> 9 }
func (i ident) group() uint8   { return uint8(i>>5) & 15 }
func (i ident) hashLen() uint8 { return uint8(i)&31 + 1 }

const (
	none   = 0
	upward = 1 << 31 // in record.prev: a parent, not a sibling; in cell.link: an entry, not a slot

	pinShift = 9
	onePin   = 1 << pinShift
	maxPins  = 1<<23 - 1

	flagLive    = 1 << 0 // the record is an entry
	flagVisible = 1 << 1 // all shards are committed
	flagDropped = 1 << 2 // not findable any more; kept until nobody holds it
	flagRecent  = 1 << 3 // in the list of visible entries that nobody pins
	flagYoung   = 1 << 4 // in partialYoung
	flagOld     = 1 << 5 // in partialOld
	flagLifted  = 1 << 7 // put above what hangs on it by lift, and not moved since
	flagGlanced = 1 << 8 // a glance has pinned it, and nobody has used it since
)

func (r *record) pins() uint32        { return r.hold >> pinShift }
func (r *record) is(flag uint32) bool { return r.hold&flag != 0 }
