package catalog

import (
	"encoding/binary"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Periods have seven lengths, 4 minutes to 11 days, so that few marks need to be read whatever
// CollectUnused is, and nodes with different CollectUnused respect each other:
//
//	             own length                  each longer one
//	writes       used, own                   used
//	reads        used: 3 to 9 periods        own: 1 to 3 periods
//
// Nodes whose own length it is read "used"; nodes with a shorter own length read "own", since a
// "used" mark of a node like themselves would last too long.
const (
	firstPeriod = 4 * time.Minute
	lastLength  = 6 // the longest period is firstPeriod * 4^lastLength
)

// OwnLength returns the own length of a node: the longest with at most half of span, so that fewer
// than 8 periods cover the span. A node that collects nothing has the longest one.
func OwnLength(span time.Duration) (length int) {
	if span == 0 {
		return lastLength
	}
	for length < lastLength && Period(length+1) <= span/2 {
		length++
	}
	return length
}

// Period returns the duration of a length.
func Period(length int) time.Duration { return firstPeriod << (2 * length) }

// PeriodAt returns the number of the period at a time.
func PeriodAt(unix int64, length int) int64 { return unix / int64(Period(length)/time.Second) }

// The kinds of use marks.
const (
	usedMark = 'u'
	ownMark  = 'o'
)

// useKey returns the key of a mark: the fingerprint, the kind, the length and the number of the
// period.
func useKey(fp pool.Fingerprint, kind byte, length int, period int64) pool.Key {
	text := append(fp[:], kind, byte(length))
	return pool.Key{Space: pool.UseMarks, Hash: pool.MakeHash(binary.BigEndian.AppendUint64(text, uint64(period)))}
}

// UseKeys returns the marks that a node puts for a space that it uses now.
func UseKeys(fp pool.Fingerprint, span time.Duration, now int64) []pool.Key {
	own := OwnLength(span)
	keys := []pool.Key{useKey(fp, ownMark, own, PeriodAt(now, own))}
	for length := own; length <= lastLength; length++ {
		keys = append(keys, useKey(fp, usedMark, length, PeriodAt(now, length)))
	}
	return keys
}

// UnusedKeys returns the marks of which none exists if no node used a space for the span.
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

// StaleMark reports whether a mark is too old to be read by any node, whatever its CollectUnused
// is.
func StaleMark(key *pool.Key, now time.Time) bool {
	text := key.Hash.Bytes[:key.Hash.Len]
	if len(text) != 26 || text[17] > lastLength {
		return false
	}
	length, period := int(text[17]), int64(binary.BigEndian.Uint64(text[18:]))
	return PeriodAt(now.Unix(), length) > period+9
}
