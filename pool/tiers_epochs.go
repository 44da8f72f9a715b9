package pool

import "crypto/sha256"

// EpochMarkers is the space that is reserved for the markers of tier epochs in shared stores: no
// engine's space has this name.
var EpochMarkers = func() (f Fingerprint) {
	sum := sha256.Sum256([]byte("kvagent: markers of tier epochs"))
	copy(f[:], sum[:])
	return f
}()
