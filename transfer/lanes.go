package transfer

// Lanes is the number of copies that run at once on a device, and who goes next: loads before saves, but a
// save that waited longer than Limits.SaveAge before both.
type Lanes struct{}
