package catalog

import (
	"encoding/binary"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Periods have seven lengths, 4 minutes to 11 days, so that the marks to be read are few whatever
// CollectUnused is, and nodes whose CollectUnused differ respect each other:
//
//	             own length                  each longer one
//	writes       used, own                   used
//	reads        used: 3 to 9 periods        own: 1 to 3 periods
//
// "used" is read by nodes whose own length it is; "own" by those whose lengths are shorter, for
// which a "used" of a node like themselves would hold for too long.
const (
	firstPeriod = 4 * time.Minute
	lastLength  = 6 // the longest period is firstPeriod * 4^lastLength
)

// OwnLength is the own length of a node: at most half of what the marks have to span, and then less
// than 8 periods span it. A node that collects nothing has the longest one.
func OwnLength(span time.Duration) (length int) {
	if span == 0 {
		return lastLength
	}
	for length < lastLength && Period(length+1) <= span/2 {
		length++
	}
	return length
}

// Period is the duration of a length.
func Period(length int) time.Duration { return firstPeriod << (2 * length) }

// PeriodAt is the number of a period.
func PeriodAt(unix int64, length int) int64 { return unix / int64(Period(length)/time.Second) }

// The kinds of use marks.
const (
	usedMark = 'u'
	ownMark  = 'o'
)

// useKey is where a mark lies: the fingerprint, the kind, the length and the number of the period.
func useKey(fp pool.Fingerprint, kind byte, length int, period int64) pool.Key {
	text := append(fp[:], kind, byte(length))
	return pool.Key{Space: pool.UseMarks, Hash: pool.MakeHash(binary.BigEndian.AppendUint64(text, uint64(period)))}
}

// UseKeys is the marks that a node puts for a space that it uses now.
func UseKeys(fp pool.Fingerprint, span time.Duration, now int64) []pool.Key {
	own := OwnLength(span)
	keys := []pool.Key{useKey(fp, ownMark, own, PeriodAt(now, own))}
	for length := own; length <= lastLength; length++ {
		keys = append(keys, useKey(fp, usedMark, length, PeriodAt(now, length)))
	}
	return keys
}

// UnusedKeys is the marks none of which is there if no node used a space for the span.
func UnusedKeys(fp pool.Fingerprint, span time.Duration, now int64) (keys []pool.Key) {
	own, from := OwnLength(span), now-int64(span/time.Second)
	for length := own; length <= lastLength; length++ {
		kind := byte(ownMark)
		if length == own {
			kind = usedMark
		}
		for n := PeriodAt(from, length); n <= PeriodAt(now, length); n++ {
			keys = append(keys, useKey(fp, kind, length, n))
		}
	}
	return keys
}

// StaleMark reports whether no node reads a mark any more, whatever its CollectUnused is.
func StaleMark(key *pool.Key, now time.Time) bool {
	text := key.Hash.Bytes[:key.Hash.Len]
	if len(text) != 26 || text[17] > lastLength {
		return false
	}
	length, period := int(text[17]), int64(binary.BigEndian.Uint64(text[18:]))
	return PeriodAt(now.Unix(), length) > period+9
}
