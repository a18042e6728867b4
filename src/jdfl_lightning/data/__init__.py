"""Data sets of several domains as LightningDataModules."""

from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.digits import DigitsDomains
from jdfl_lightning.data.folder import ImageFolderDomains
from jdfl_lightning.data.hub import HubDomains
from jdfl_lightning.data.office_caltech import OfficeCaltech
from jdfl_lightning.data.pacs import PACS
from jdfl_lightning.data.real_digits import RealDigits
from jdfl_lightning.data.site_folders import SiteFolders

__all__ = [
    "PACS",
    "DigitsDomains",
    "DomainDataModule",
    "HubDomains",
    "ImageFolderDomains",
    "OfficeCaltech",
    "RealDigits",
    "SiteFolders",
]
