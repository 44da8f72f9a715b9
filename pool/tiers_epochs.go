package pool

import (
	"context"
	"crypto/sha256"
)

// SpaceUse is what Tiers can do besides: hear which spaces engines use, and tell of resets that
// came from other nodes. None of its methods waits for a disk or a store.
type SpaceUse interface {
	// InUse tells that an engine of a space is here. private says that no other engine will ever be
	// of this space: what tiers have of it is collected a named time after NotInUse, unless InUse
	// comes before.
	InUse(f Fingerprint, private bool)
	// NotInUse tells that the last engine of a space is gone.
	NotInUse(f Fingerprint)
	// OnAdopted names the function that is called, without any lock held, when a space that is open
	// got a new epoch because of a reset on another node; nil: nobody is.
	OnAdopted(then func(f Fingerprint))
}

// SpaceLister is what a Store can do besides: List of some spaces alone.
type SpaceLister interface {
	// ListSpaces calls found for every shard of the spaces. Now and then it calls looked with the
	// number of keys it has looked at since the last call, holding nothing that others wait for:
	// looked may take its time, and calls the store itself. An error of looked ends the list, and
	// is its error.
	ListSpaces(
		ctx context.Context, spaces []Fingerprint, looked func(n int) error, found func(k Key, bytes int64),
	) error
}

// EpochMarkers is the space that is reserved for the markers of tier epochs in shared stores: no
// engine's space has this name.
var EpochMarkers = func() (f Fingerprint) {
	sum := sha256.Sum256([]byte("kvagent: markers of tier epochs"))
	copy(f[:], sum[:])
	return f
}()
